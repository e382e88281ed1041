/* halfstep.h - optimizer steps on weights and states stored in 32, 16, 8 or 4 bits and computed in fp32.
 *
 * This header is the manual. A whole program:
 *
 *   #include <halfstep.h>
 *   #include <stdio.h>
 *
 *   int main(void)
 *   {
 *       static float weight[1024 * 256], gradient[1024 * 256];
 *       void *weights[] = {weight};
 *       const void *gradients[] = {gradient};
 *       halfstep_optimizer *opt;
 *       int32_t group, index;
 *       halfstep_tensor layer = {sizeof layer, .name = "layer.weight", .gradient = "f32",
 *                                .ndim = 2, .rows = 1024, .row_length = 256};
 *       int error = halfstep_create(NULL, &opt);
 *       if (!error) error = halfstep_add_group(opt, "adamw/f32/int8", &group);
 *       if (!error) error = halfstep_set_hyper(opt, group, "lr", 0.01);
 *       if (!error) error = halfstep_add_tensor(opt, &layer, &index);
 *       if (!error) error = halfstep_allocate_states(opt);
 *       for (int step = 0; step < 100 && !error; step++) {
 *           for (int i = 0; i < 1024 * 256; i++) gradient[i] = weight[i] - 1.0f;
 *           error = halfstep_step(opt, weights, gradients);
 *       }
 *       printf("%g %s\n", weight[0], halfstep_error_detail(opt));
 *       halfstep_destroy(opt);
 *       return error != 0;
 *   }
 *
 * CONTENTS. Make an optimizer, describe its tensors, step, read and save; then what rules and formats there are,
 * threads, devices, and what few programs need (behind HALFSTEP_ADVANCED). The header includes nothing but <stddef.h>
 * and <stdint.h>, compiles alone as C11 and C++, and uses only fixed-width integers, float, double and pointers, so
 * that a binding can mirror it line by line.
 *
 * WORDS. A *rule* is the arithmetic of one optimizer (adamw, lion, ...). A *format* is how one tensor is stored. A
 * *recipe* names both: "rule/weight format/state format", with "+" between the formats of several states
 * ("adamw/bf16-sr/int8+bf16-sr"). Parts left out take the rule's defaults: f32 weights and f32 states; bf16-sr states
 * for any bf16 weight. A *slot* is one stored tensor of a parameter: its weight, its gradient, each of its states. A
 * slot may have a second stream of bytes (*extra*): the Kahan residual, the error code, the scales of a block format.
 *
 * ERRORS. Every function that can fail returns int: HALFSTEP_OK, or a negative code below. halfstep_strerror() gives
 * the kind, halfstep_error_detail() a sentence about the last failure on that handle. A failed call changes nothing.
 * The library never prints, exits or aborts, and allocates nothing inside a step.
 *
 * STRUCTURES begin with struct_size, which the caller sets to the size that its header gives them. A smaller one is
 * that of an older header: what it lacks has its default, or is not filled in. A larger one is taken if what this
 * library does not know of it is zero, else ARGUMENT. Zero is the default of every field.
 *
 * BITS. The same inputs, seed and counters give the same bits in weights and states on every instruction set, compiler,
 * thread count and shard layout. docs/numerics.md states the contract.
 *
 * THREADS. Different handles may be used at the same time. On one handle, calls about different single tensors may run
 * at the same time (HALFSTEP_CALL_TENSOR). Everything else on one handle is the caller's to serialise. After fork() the
 * child may go on with its copy. The caller's floating-point mode (rounding, flushing of subnormals) neither matters
 * nor changes.
 *
 * DEVICES. A handle computes on the processor, or on a device (options.device): then its states, weights and gradients
 * are memory of that device, and a step is submitted to a stream and not waited for. See "Devices" below and
 * docs/gpu.md.
 *
 * MEMORY. Weights and gradients always belong to the caller and need only the alignment of their element. States belong
 * to the caller (halfstep_bind_states, halfstep_bind_slot) or to the library (halfstep_allocate_states). For best speed
 * buffers of many megabytes should not start at equal offsets modulo large powers of two; the library's own do not. */
#ifndef HALFSTEP_H
#define HALFSTEP_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define HALFSTEP_API
#else
#define HALFSTEP_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define HALFSTEP_VERSION_MAJOR 0
#define HALFSTEP_VERSION_MINOR 1
#define HALFSTEP_VERSION_PATCH 0
/* Raised whenever a binary built against an older header could misbehave. Part of the soname. */
#define HALFSTEP_ABI 2

/* Returns the version of the library that is loaded, as major * 10000 + minor * 100 + patch. */
HALFSTEP_API int32_t halfstep_version(void);

/* ---- Errors. Values are pinned and never reused. ----------------------------------------------------------------- */

#define HALFSTEP_OK                  0
#define HALFSTEP_ERROR_ARGUMENT    -10 /* NULL where a pointer is needed, a wrong struct_size, an index out of range */
#define HALFSTEP_ERROR_NAME        -11 /* an unknown rule, format, hyper-parameter, choice, instruction set ... */
#define HALFSTEP_ERROR_RANGE       -12 /* a number outside the bounds that the matching info function tells */
#define HALFSTEP_ERROR_SHAPE       -13 /* rows, columns or a shard that do not fit together, or overflow */
#define HALFSTEP_ERROR_DUPLICATE   -14 /* two tensors with one id */
#define HALFSTEP_ERROR_ORDER       -15 /* a call at the wrong time: a step before states exist, a tensor after them */
#define HALFSTEP_ERROR_UNSUPPORTED -20 /* a combination that has no meaning, e.g. a block format for a gradient */
#define HALFSTEP_ERROR_MEMORY      -30
#define HALFSTEP_ERROR_DEVICE      -31 /* a device, or its driver: none, too old, of no use here, or it has failed.
                                          After a failure that the driver calls lasting every handle on it refuses */
#define HALFSTEP_ERROR_FORMAT      -40 /* halfstep_io: a file that is not what it should be */
#define HALFSTEP_ERROR_MISMATCH    -41 /* halfstep_io: a sound file that belongs to another configuration */
#define HALFSTEP_ERROR_IO          -42 /* halfstep_io: the operating system refused */
#define HALFSTEP_NONFINITE         -50 /* not a failure of the call: a gradient was NaN, infinite or too large, or their
                                          norm not finite, so the step was refused and not one bit changed */

/* Returns a static text for a code; never NULL. */
HALFSTEP_API const char *halfstep_strerror(int code);

#define HALFSTEP_MAX_STATES  6
#define HALFSTEP_MAX_SCALARS 4

/* ---- Make an optimizer ------------------------------------------------------------------------------------------- */

typedef struct halfstep_optimizer halfstep_optimizer;

/* A host that has its own threads may lend them: run(host, task, argument, n) must call task(argument, i) once for
 * every i in 0 .. n - 1, in any order, on any threads, also one after another, and return when all are done. It must
 * not begin another call on the same handle on a thread that it borrows while it waits. */
typedef void (*halfstep_task)(void *argument, int64_t index);
typedef void (*halfstep_run_tasks)(void *host, halfstep_task task, void *argument, int64_t n);

typedef struct halfstep_options {
    uint32_t struct_size;      /* sizeof(halfstep_options) */
    int32_t threads;           /* 0: halfstep_default_threads() at each step; else 1 .. 1024 */
    uint64_t seed;             /* of the random bits */
    halfstep_run_tasks run;    /* NULL: the library's own pool */
    void *host;                /* first argument of run */
    const char *device;        /* NULL or "cpu"; "cuda": the first GPU; "cuda:N": number N, from 0 */
    void *stream;              /* of the device, a CUstream (cudaStream_t); NULL: its default stream */
} halfstep_options;

/* Makes an optimizer without groups and tensors. options may be NULL. *optimizer is NULL after an error. Errors: NAME
 * for a device that is unknown, ARGUMENT for a stream without a device, RANGE, MEMORY; DEVICE where the device cannot
 * be used: halfstep_error_detail(NULL) then has the sentence. */
HALFSTEP_API int halfstep_create(const halfstep_options *options, halfstep_optimizer **optimizer);
/* Frees everything that the library allocated for an optimizer; NULL is fine. */
HALFSTEP_API void halfstep_destroy(halfstep_optimizer *optimizer);
/* Returns a sentence about the last error or refused step on this handle, "" if there was none: that of the calling
 * thread's own last error, where its last error was on this handle, else of any thread's. NULL: of the thread's last
 * error, if that was of halfstep_create() or halfstep_get_device_info(). Valid until the thread's next call. */
HALFSTEP_API const char *halfstep_error_detail(const halfstep_optimizer *optimizer);

#define HALFSTEP_ALL_GROUPS (-1)

/* Adds a group: a recipe with its hyper-parameters. Its index goes to *group. Errors: NAME, UNSUPPORTED, as for
 * halfstep_recipe_full(); ORDER once the states exist. */
HALFSTEP_API int halfstep_add_group(halfstep_optimizer *optimizer, const char *recipe, int32_t *group);
HALFSTEP_API int32_t halfstep_group_count(const halfstep_optimizer *optimizer);
/* Writes the full form of a group's recipe, as halfstep_recipe_full() does (64 bytes are enough for any). */
HALFSTEP_API int halfstep_get_group_recipe(const halfstep_optimizer *optimizer, int32_t group, char *text, size_t size);
/* Sets a hyper-parameter: a double, by name, checked against its bounds, and read at each step. NaN is out of bounds.
 * Those that belong to the optimizer ("gradient_scale", "clip_norm") and any that shall be set in every group that has
 * it take group = HALFSTEP_ALL_GROUPS. Common to all rules:
 *   lr               learning rate; 0 changes no bit of any weight
 *   weight_decay     coefficient of the group's decay mode
 *   reference_lr     "fully-decoupled" decay shrinks by (lr / reference_lr) * weight_decay; 0 (not set) is the group's
 *                    lr as it was first set. RANGE at a step whose lr is more than ten times that, or
 *                    whose decay is above 1
 *   maximize         1: ascend
 *   centralize       0 .. 1: this fraction of the mean over all dimensions but the first is taken from the gradient of
 *                    tensors with two or more dimensions (Yong et al. 2020)
 *   cautious         1: only elements whose update has the sign of their gradient move, by the update over the fraction
 *                    that they are of the tensor (at least 1/1000); decay is left as it is (Liang et al. 2024). Of
 *                    rules with halfstep_rule_info.cautious; a step then needs a sum over each tensor first
 *   warmup_steps, total_steps, final_fraction, decay_start, power    of the schedule
 *   gradient_scale   (optimizer) gradients are multiplied by it first, e.g. 1 / loss scale
 *   clip_norm        (optimizer) c: gradients are scaled by min(1, c / (norm + 1e-6)), the norm over all tensors after
 *                    gradient_scale; 0 turns clipping off
 * Errors: NAME, RANGE; UNSUPPORTED where the rule cannot be cautious; ORDER where a value would change which states or
 * sums there are after the states exist (sgd's momentum, and cautious, from or to 0). */
HALFSTEP_API int halfstep_set_hyper(halfstep_optimizer *optimizer, int32_t group, const char *name, double value);
HALFSTEP_API int halfstep_get_hyper(const halfstep_optimizer *optimizer, int32_t group, const char *name,
                                    double *value);
/* Sets a choice, which is a name. Per group:
 *   decay      "l2": g += weight_decay * w; "decoupled": w -= lr * weight_decay * w (Loshchilov & Hutter 2019);
 *              "fully-decoupled": as "reference_lr" above; "proximal": w = (w - lr * update) / (1 + lr * weight_decay)
 *              (Xie et al. 2022)
 *   schedule   a factor on lr, by the group's count of accepted steps: "constant", "linear", "cosine", "wsd",
 *              "inverse-power" (the schedule of the adamw_bfloat16 package)
 * Per optimizer (group = HALFSTEP_ALL_GROUPS):
 *   scan       "scan": gradients are read once more before anything is written, and a step with a non-finite one is
 *              refused whole; "per-tensor": tensors are judged one by one, the others are stepped and the call returns
 *              HALFSTEP_NONFINITE all the same; "known-finite": the caller vouches
 *   clip       in gradient release: "delayed": the norm of the round before, and each tensor's own until a round
 *              has had one; "per-tensor": each tensor's own
 *   generator  "lattice", "mixer" or "philox7": the source of random bits (docs/random.md)
 *   missing    "skip": a step leaves tensors alone whose gradient is NULL; "error": it refuses to be made
 * A step is refused, too, if the effective gradient g has |g| >= 2^62: its square would leave fp32. */
HALFSTEP_API int halfstep_set_choice(halfstep_optimizer *optimizer, int32_t group, const char *choice,
                                     const char *value);
HALFSTEP_API const char *halfstep_get_choice(const halfstep_optimizer *optimizer, int32_t group, const char *choice);
/* Tells the lr that the group's next step will use: "lr" times the schedule's factor. */
HALFSTEP_API int halfstep_current_lr(const halfstep_optimizer *optimizer, int32_t group, double *lr);

/* ---- Describe its tensors ---------------------------------------------------------------------------------------- */

/* A tensor is rows x row_length: dimension 0, and everything after it flattened. A tensor of one dimension has n rows
 * of length 1; from 4096 elements up the caller may declare it as 1 row of length n instead, which makes flat buffers
 * eligible for block formats. The part held here is a rectangle of it; its elements lie densely, row by row, in the
 * weight, gradient and state buffers. All that depends on shape (blocks, random bits, eligibility) depends on the whole
 * tensor. */
typedef struct halfstep_tensor {
    uint32_t struct_size;     /* sizeof(halfstep_tensor) */
    int32_t group;
    const char *name;         /* copied; errors and files call the tensor by it */
    uint64_t id;              /* keys its random bits; 0: a hash of the name, the same on every rank */
    int32_t ndim;             /* dimensions of the original tensor, 0 for a scalar */
    int32_t reserved;         /* 0 */
    int64_t rows, row_length; /* the whole tensor */
    int64_t first_row, n_rows, first_column, n_columns; /* the part held here; all four zero: the whole */
    const char *gradient;     /* format of its gradients: "f32", "bf16", "f16" */
} halfstep_tensor;

/* Adds a tensor; its index goes to *index. Errors: SHAPE (names the tensor, and the cut that is not on a block
 * boundary), DUPLICATE, NAME, ORDER. A part of zero elements is fine. */
HALFSTEP_API int halfstep_add_tensor(halfstep_optimizer *optimizer, const halfstep_tensor *tensor, int32_t *index);
HALFSTEP_API int32_t halfstep_tensor_count(const halfstep_optimizer *optimizer);
/* Tells a tensor as it was added, with the id and the part that zeros stood for; name lives as long as the handle. The
 * caller sets tensor->struct_size. */
HALFSTEP_API int halfstep_get_tensor(const halfstep_optimizer *optimizer, int32_t index, halfstep_tensor *tensor);
/* Returns the index of the tensor of a name, or -1. */
HALFSTEP_API int32_t halfstep_tensor_find(const halfstep_optimizer *optimizer, const char *name);

/* ---- Slots and their memory -------------------------------------------------------------------------------------- */

#define HALFSTEP_SLOT_WEIGHT   0
#define HALFSTEP_SLOT_GRADIENT 1
#define HALFSTEP_SLOT_STATE    2 /* + index of the state */

typedef struct halfstep_slot_info {
    uint32_t struct_size;
    int32_t format;            /* row of halfstep_get_format_info(), -1: this slot stores nothing */
    const char *name;          /* "weight", "gradient", or the state's name, e.g. "exp_avg" */
    uint64_t code_bytes;       /* of the part held here */
    uint64_t extra_bytes;
    int64_t blocks_per_row;    /* of the part held here, for block formats of geometry ROWS */
    int32_t fell_back;         /* 1: too short a row or too few dimensions for the block format of the recipe */
    int32_t grid;              /* 1: stored on a grid: halfstep_record.grid */
    void *code, *extra;        /* where it is bound, NULL for weights' and gradients' own bytes */
    int64_t rows, columns;     /* of what it stores of the part held here: a vector over rows is rows x 1, one over
                                  columns 1 x columns, and halfstep_read_slot() and halfstep_write_slot() take it so */
    int32_t precise;           /* 1: in the format of halfstep_rule_info.precise_format, not in the recipe's */
    int32_t reserved;
} halfstep_slot_info;

HALFSTEP_API int halfstep_get_slot_info(const halfstep_optimizer *optimizer, int32_t tensor, int32_t slot,
                                        halfstep_slot_info *info);

/* Tells the bytes that halfstep_bind_states() wants for everything that is stored beside weights and gradients: states,
 * their scales, residuals and error codes. Every stream starts on 64 bytes. */
HALFSTEP_API int halfstep_state_bytes(halfstep_optimizer *optimizer, uint64_t *bytes);
/* Gives the states their memory (64-byte aligned, at least that many bytes, the caller's until the handle is destroyed)
 * and sets them to their initial values. No tensor or group can be added afterwards. */
HALFSTEP_API int halfstep_bind_states(halfstep_optimizer *optimizer, void *memory, uint64_t bytes);
/* Does the same with the library's memory: huge pages where large, slots staggered. */
HALFSTEP_API int halfstep_allocate_states(halfstep_optimizer *optimizer);

/* ---- Step -------------------------------------------------------------------------------------------------------- */

/* Makes one update of every tensor: weights[i] and gradients[i] belong to tensor i and are read anew at each call. A
 * NULL gradient leaves that tensor alone, weights, states and counters, though the call counts as a step of every
 * schedule; for a part of no elements pass any other address, so that its counters keep pace with those of the other
 * shards. NULL weights with a gradient and n > 0 are an error. Gradients are never written. Returns HALFSTEP_NONFINITE,
 * with nothing changed, if a gradient is not finite. UNSUPPORTED for a part of a tensor, unless nothing has to be known
 * of the rest of it: scan "known-finite", no clipping, a rule of one pass. */
HALFSTEP_API int halfstep_step(halfstep_optimizer *optimizer, void *const *weights, const void *const *gradients);

/* What a call covers. */
#define HALFSTEP_CALL_STEP   0 /* every tensor, as halfstep_step() does */
#define HALFSTEP_CALL_TENSOR 1 /* one tensor, as soon as its gradient exists (gradient release) */
#define HALFSTEP_CALL_ROUND  2 /* the end of a round, in which tensors had their TENSOR calls */

typedef struct halfstep_call {
    uint32_t struct_size;         /* sizeof(halfstep_call) */
    int32_t kind;                 /* HALFSTEP_CALL_* */
    int32_t tensor;               /* of TENSOR: its index */
    int32_t micro;                /* 1: a micro-step: gradients go into the states, and weights stay as they are */
    void *const *weights;         /* of STEP: a pointer for each tensor; of TENSOR: one pointer. Not read in a
                                     micro-step */
    const void *const *gradients; /* as weights */
    int64_t *statistics;          /* of halfstep_run_begin() and its kin; NULL for halfstep_run() */
} halfstep_call;

/* Makes the call that `call` describes, in one piece.
 *   STEP    halfstep_step().
 *   TENSOR  one update of one tensor. Not finite: that tensor is left alone and HALFSTEP_NONFINITE returned.
 *           UNSUPPORTED for parts, as in halfstep_step(), and for rules with totals.
 *   ROUND   advances the schedules and the norm of "delayed" clipping. Call it when all tensors of a round have had
 *           their update. UNSUPPORTED where a round with clipping had parts of tensors. HALFSTEP_NONFINITE if the norm
 *           of the round is not finite: then the round goes on.
 *   micro   of STEP and TENSOR: puts the gradients into the states and leaves the weights alone (optimizer
 *           accumulation); the last gradient of a step comes without micro. Decay rates act on every micro-step, second
 *           moments see the squares of micro-gradients, and gradients are not divided by their number: moments average.
 *           No clipping. Bias corrections count micro-steps; schedules, Lookahead and averages of weights count steps.
 *           UNSUPPORTED where micro-gradients would be lost (sgd and rmsprop without momentum, schedulefree, ema) and
 *           for l2 decay, which only the last gradient would get. */
HALFSTEP_API int halfstep_run(halfstep_optimizer *optimizer, const halfstep_call *call);

/* Adds scale * gradient to an accumulator of one tensor, in the given format ("f32", "bf16", "bf16-sr", "f16"); the
 * accumulator has the shape of the part held here. With "bf16-sr" it consumes random bits of the tensor's gradient
 * slot. The accumulator is then the gradient of a step. Not finite values go through: the step will judge them. Groups
 * and tensors may still be added afterwards. */
HALFSTEP_API int halfstep_accumulate(halfstep_optimizer *optimizer, int32_t tensor, void *accumulator,
                                     const char *format, const void *gradient, const char *gradient_format,
                                     double scale);

/* ---- Read and save ----------------------------------------------------------------------------------------------- */

/* The largest count of anything that may be set. */
#define HALFSTEP_MAX_COUNT INT64_MAX

/* What a record is of. */
#define HALFSTEP_RECORD_OPTIMIZER 0
#define HALFSTEP_RECORD_GROUP     1
#define HALFSTEP_RECORD_TENSOR    2

/* All that a checkpoint keeps beside weights, slots, hyper-parameters and choices. The fields of other kinds are 0. */
typedef struct halfstep_record {
    uint32_t struct_size;  /* sizeof(halfstep_record) */
    int32_t kind;          /* HALFSTEP_RECORD_* */
    int32_t index;         /* of the group or of the tensor */
    int32_t reserved;      /* 0 */

    /* OPTIMIZER */
    uint64_t seed;         /* of the random bits */
    uint64_t skipped_steps; /* steps (with "per-tensor" judging and in release, single tensors) refused so far because
                              of a gradient that was not finite */
    double gradient_norm;  /* the global norm, after gradient_scale and before clipping, of the last step or round that
                              computed it (clip_norm > 0), else 0. "Delayed" clipping goes by it */

    /* GROUP */
    uint64_t steps;        /* accepted steps so far, which its schedule goes by */

    /* TENSOR */
    uint64_t id;           /* keys its random bits; 0 in halfstep_set_record() keeps the tensor's own */
    uint64_t state_steps;  /* updates of its states (bias correction) */
    uint64_t full_steps;   /* updates of its weight */
    uint64_t writes;       /* passes that may have drawn random bits: updates of its states and stochastic
                              accumulations, so that writes - state_steps counts the latter */
    double scalar[HALFSTEP_MAX_SCALARS]; /* of the rule, in the order of halfstep_rule_info.scalar_name: state
                              (adamw-delayed's accumulated_decay), or what the last update was (lamb's weight_norm,
                              update_norm and trust_ratio). Tensors that share totals (prodigy) have one set: that of
                              the tensor whose first scalar is largest counts for all */
    double grid[HALFSTEP_MAX_STATES]; /* of states with halfstep_slot_info.grid: an fp32 number in [1/4, 1] that the
                              stored second moment is to be multiplied by. 1 at first; each write of the state
                              multiplies it by the state's decay rate (a maximum has none), and by 4 where that is below
                              1/4. Equal on all parts of a tensor. It belongs to the bytes of the slot: set both, or
                              neither; bytes of checkpoints that have no such number are of 1 */
} halfstep_record;

/* Reads the record of which kind and index are given. */
HALFSTEP_API int halfstep_get_record(const halfstep_optimizer *optimizer, halfstep_record *record);
/* Restores a record. To change one field, get the record first. Errors: RANGE for a count above HALFSTEP_MAX_COUNT, and
 * for a number that no update leaves there; DUPLICATE for the id of another tensor; ARGUMENT for a scalar or a grid
 * that the tensor does not have. */
HALFSTEP_API int halfstep_set_record(halfstep_optimizer *optimizer, const halfstep_record *record);

/* Return skipped_steps and gradient_norm of the optimizer's record. */
HALFSTEP_API uint64_t halfstep_skipped_steps(const halfstep_optimizer *optimizer);
HALFSTEP_API double halfstep_gradient_norm(const halfstep_optimizer *optimizer);
/* Returns the name of the first offending tensor of the last refusal on this process, "" if there was none (it may be
 * on another rank). *too_large becomes 1 if its gradient was finite, but times gradient_scale 2^62 or more, else 0;
 * NULL is fine. */
HALFSTEP_API const char *halfstep_nonfinite_tensor(const halfstep_optimizer *optimizer, int32_t *too_large);
/* Counts the elements of a 16-bit weight that stand at the end of their format's range, +-65504 for IEEE half: weights
 * saturate there instead of becoming infinite. `weight` is the caller's buffer. 0 for formats of more bits. */
HALFSTEP_API int halfstep_saturated(const halfstep_optimizer *optimizer, int32_t tensor, const void *weight,
                                    uint64_t *count);

/* Decode (read) and encode (write) rows first_row .. first_row + n_rows - 1 of the part held here (counted from its
 * first row) as fp32, n_rows x n_columns of them. `data` is the caller's weight or gradient buffer for those slots and
 * NULL for states. Writes round to nearest (ties away from zero where the format is stochastic), consume no random
 * bits, and saturate; a weight with a residual or error code gets both parts; a second moment with a grid is stored on
 * the one that stands. RANGE: a value that is not finite for a block format, and for a second moment one that is
 * negative or not finite; its -0 is stored as +0. */
HALFSTEP_API int halfstep_read_slot(const halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, const void *data,
                                    int64_t first_row, int64_t n_rows, float *out);
HALFSTEP_API int halfstep_write_slot(halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, void *data,
                                     int64_t first_row, int64_t n_rows, const float *in);
/* Reads the weights to evaluate, decoded like halfstep_read_slot() of the weight: schedulefree's average x, for other
 * rules the weights themselves. */
HALFSTEP_API int halfstep_read_average(const halfstep_optimizer *optimizer, int32_t tensor, const void *weight,
                                       int64_t first_row, int64_t n_rows, float *out);

/* Tells the bytes held for the part here, in the whole optimizer: the weights' and gradients' own, the extra streams of
 * weights, the states with their scales and, once they exist, what muon works on a matrix in. And how many tensors fell
 * back from a block format. Any pointer may be NULL. */
HALFSTEP_API int halfstep_memory(const halfstep_optimizer *optimizer, uint64_t *weights, uint64_t *gradients,
                                 uint64_t *weight_extras, uint64_t *states, int32_t *fell_back);

/* ---- Rules, formats, choices ------------------------------------------------------------------------------------- */

/* Roles of a slot: what a format must be able to hold. */
#define HALFSTEP_ROLE_WEIGHT   1 /* as a state: stored in the weight's format, starts as a copy of the weight */
#define HALFSTEP_ROLE_GRADIENT 2 /* as a state: any format for either sign but block formats */
#define HALFSTEP_ROLE_SIGNED   4 /* a state of either sign */
#define HALFSTEP_ROLE_NONNEG   8 /* a state that is never negative, such as a second moment */

/* What shares a scale in a block format. */
#define HALFSTEP_GEOMETRY_ROWS   0 /* a run of elements within a row; the last of a row may be short */
#define HALFSTEP_GEOMETRY_FLAT   1 /* a run of elements of the flattened tensor, whole runs only */
#define HALFSTEP_GEOMETRY_TENSOR 2 /* the whole tensor */

/* What a state has a number for. Vectors are fp32 in every recipe, and only matrices have them: tensors of two or more
 * dimensions with more than one row and column. */
#define HALFSTEP_EXTENT_ELEMENTS 0
#define HALFSTEP_EXTENT_ROWS     1 /* one number for each row, such as a factored second moment */
#define HALFSTEP_EXTENT_COLUMNS  2 /* one for each column */

typedef struct halfstep_rule_info {
    uint32_t struct_size;   /* set by the caller: sizeof(halfstep_rule_info) */
    int32_t id;             /* pinned */
    const char *name;
    const char *title;      /* one line for people */
    int32_t states;         /* 0 .. HALFSTEP_MAX_STATES; a rule may need fewer for some hyper-parameters (sgd without
                               momentum needs none) */
    int32_t state_role[HALFSTEP_MAX_STATES];
    const char *state_name[HALFSTEP_MAX_STATES];
    int32_t hypers;         /* how many hyper-parameters halfstep_hyper_info() lists for it */
    const char *decay;      /* its default decay mode */
    int32_t scalars;        /* doubles that it keeps for each tensor: halfstep_record.scalar */
    int32_t two_pass;       /* 1: sums over each whole tensor come before its update (halfstep_run_norms) */
    const char *scalar_name[HALFSTEP_MAX_SCALARS];
    int32_t matrix;         /* 1: tensors of two or more dimensions are stepped as matrices and cannot be sharded */
    int32_t raw_gradient;   /* 1: the gradient slot holds a weight, in any weight format (ema) */
    int32_t accumulates;    /* 1: micro-steps keep the gradient in a state (halfstep_call.micro) */
    int32_t average;        /* 1: the weights to evaluate are not those being trained: halfstep_read_average() */
    const char *label;      /* the name as an identifier, e.g. "AdamW", for the classes of a binding */
    int32_t state_extent[HALFSTEP_MAX_STATES]; /* HALFSTEP_EXTENT_* */
    int32_t totals;         /* sums over all tensors that come before any update: no tensor is stepped alone */
    int32_t cautious;       /* 1: the hyper-parameter of that name may be 1 */
    /* Of states that are a largest value, or are subtracted, while a hyper-parameter is not 0: which one, and the
       format that such a state then has in place of a block format, whose errors would not average out. Else NULL. */
    const char *precise_if[HALFSTEP_MAX_STATES];
    const char *precise_format[HALFSTEP_MAX_STATES];
} halfstep_rule_info;

typedef struct halfstep_format_info {
    uint32_t struct_size;
    int32_t id;
    const char *name;
    const char *title;
    int32_t roles;          /* sum of HALFSTEP_ROLE_* that it may serve */
    int32_t code_bits;      /* bits per element of the main stream */
    int32_t extra_bits;     /* bits per element of the extra stream (Kahan residual, error code), or 0 */
    int32_t block;          /* elements that share one scale, or 0 */
    int32_t scale_bytes;    /* bytes of one scale, or 0 */
    int32_t stochastic;     /* 1: its writes consume random bits */
    const char *code_dtype; /* safetensors dtype of the main stream, e.g. "BF16"; "U8" holds two 4-bit codes */
    const char *extra_dtype;/* of the extra stream (residuals, error codes, scales), or NULL */
    int32_t geometry;       /* HALFSTEP_GEOMETRY_*, for block formats */
    int32_t grid;           /* 1: second moments are stored on a grid that decays with them: halfstep_record.grid */
} halfstep_format_info;

typedef struct halfstep_hyper_info {
    uint32_t struct_size;
    const char *name;
    const char *title;      /* of a switch, which is 0 or 1, it begins with "0:" or "1:" and what that value does */
    double initial;
    double minimum;         /* inclusive */
    double maximum;         /* inclusive unless exclusive_maximum */
    int32_t exclusive_maximum;
    int32_t per_optimizer;  /* 1: belongs to the optimizer, set with group = HALFSTEP_ALL_GROUPS only */
} halfstep_hyper_info;

/* Rows are numbered 0 .. count - 1 in the order of the tables; ids are what is stored in files.
 * _find returns the row or -1. */
HALFSTEP_API int32_t halfstep_rule_count(void);
HALFSTEP_API int halfstep_get_rule_info(int32_t row, halfstep_rule_info *info);
HALFSTEP_API int32_t halfstep_rule_find(const char *name);
HALFSTEP_API int32_t halfstep_format_count(void);
HALFSTEP_API int halfstep_get_format_info(int32_t row, halfstep_format_info *info);
HALFSTEP_API int32_t halfstep_format_find(const char *name);
/* Tells hyper-parameter `index` (0 .. hypers - 1) of the rule in row `rule`; those common to all rules come first. */
HALFSTEP_API int halfstep_get_hyper_info(int32_t rule, int32_t index, halfstep_hyper_info *info);
/* Returns the values that a choice can take, by position, or NULL past the last; the first is the default (for "decay",
 * the rule's own is). Choices: "decay", "schedule", "scan", "generator", "clip", "missing". */
HALFSTEP_API const char *halfstep_choice_value(const char *choice, int32_t index);

/* Writes the full form of a recipe, every part spelled out, into text[size] (64 bytes are enough for any).
 * Errors: NAME (which part), UNSUPPORTED (a format that cannot serve the role; a wrong number of state formats). */
HALFSTEP_API int halfstep_recipe_full(const char *recipe, char *text, size_t size);

/* Tells the bytes that one tensor takes under a recipe, before anything exists, with the rule's default
 * hyper-parameters (sgd without momentum). All out pointers may be NULL. */
HALFSTEP_API int halfstep_recipe_bytes(const char *recipe, int32_t ndim, int64_t rows, int64_t row_length,
                                       uint64_t *weight, uint64_t *weight_extra, uint64_t *states);

/* ---- Threads and instruction sets -----------------------------------------------------------------------------------
 * */

/* Returns what "threads = 0" means now: HALFSTEP_THREADS, else OMP_NUM_THREADS, else the processors this process may
 * use. On Linux, where these belong to several NUMA nodes, the library's own threads are each kept on one node, in the
 * order of their shares of a step, and halfstep_allocate_states() has each share's states touched first by its thread.
 * HALFSTEP_PIN=0 leaves threads alone, HALFSTEP_PIN=1 keeps them on their node also where there is one. The caller's
 * thread is never moved. */
HALFSTEP_API int32_t halfstep_default_threads(void);
/* Changes options.threads from the next step on. Errors: RANGE. */
HALFSTEP_API int halfstep_set_threads(halfstep_optimizer *optimizer, int32_t threads);

/* Returns the name of the instruction set in use: the best that this build and this processor have, or the one that the
 * environment variable HALFSTEP_ISA names. Any gives the same bits. */
HALFSTEP_API const char *halfstep_isa(void);

/* ---- Devices ----------------------------------------------------------------------------------------------------- */

/* What a handle on a device ("cuda") does otherwise than one on the processor:
 *   memory    weights, gradients, states and what halfstep_accumulate() adds are memory of that device, the caller's or
 *             from halfstep_device_allocate(); ARGUMENT for any other, with nothing changed. Values of
 *             halfstep_read_slot() and halfstep_write_slot() stay the process's. Statistics may be either; for the
 *             process's there is a wait.
 *   steps     are submitted to the stream in the order of the calls, whose arrays of pointers have been read when a
 *             call returns: gradients must stay until the stream has come that far. They return HALFSTEP_OK where a
 *             processor would say HALFSTEP_NONFINITE: halfstep_synchronize() says it.
 *   reading   of counters, scalars, slots, steps of groups, the lr, the norm or skipped steps waits for the stream, and
 *             so do the copies of halfstep_bind_record(), which are written then.
 *   capture   while the stream is captured into a CUDA graph, steps are recorded, and counters, schedules and random
 *             bits go on at each replay. Call halfstep_synchronize() before the capture begins; whatever waits,
 *             allocates or sends anything changed is refused with ORDER until it ends, and a second step in one capture
 *             must have the pointers of the first. Hyper-parameters that are set afterwards reach the replays that
 *             follow.
 *   threads   as on a processor; any thread may call, whatever context is current in it.
 *   fork      the child cannot use such a handle, but for destroying it.
 * A handle without tensors cannot step (ORDER). */

/* Waits for everything that was asked for. HALFSTEP_NONFINITE if a step or round was refused since the last call, with
 * the sentence of the last of them, DEVICE if the device failed. On the processor everything has been told: always
 * HALFSTEP_OK. */
HALFSTEP_API int halfstep_synchronize(halfstep_optimizer *optimizer);
/* Sets another stream of the same device, for all that is asked for from now on; it is made to wait for what was asked
 * for before, unless it is being captured. Errors: ARGUMENT on the processor unless NULL, DEVICE. */
HALFSTEP_API int halfstep_set_stream(halfstep_optimizer *optimizer, void *stream);
typedef struct halfstep_device_info {
    uint32_t struct_size;
    int32_t devices;         /* that the driver shows */
    int32_t driver;          /* the newest CUDA it speaks, 1000 * major + 10 * minor; 0: no driver */
    int32_t minimum_driver;  /* that the library takes */
    int32_t images;          /* of device code in this build, one for each architecture, and PTX; 0: it has none */
    int32_t compute;         /* compute capability, 10 * major + minor */
    int32_t multiprocessors;
    int32_t usable;          /* 1: halfstep_create() would take it */
    uint64_t memory;         /* bytes */
    const char *name;        /* "" if there is none; static text */
} halfstep_device_info;

/* Tells as much as can be told of a device of halfstep_options, whether or not it can be used; where it cannot,
 * halfstep_error_detail(NULL) says why. Errors: ARGUMENT; NAME for what is no device, or the processor. */
HALFSTEP_API int halfstep_get_device_info(const char *device, halfstep_device_info *info);

#ifdef __cplusplus
}
#endif
#endif

/* ---- What few programs need -------------------------------------------------------------------------------------- */

/* Define HALFSTEP_ADVANCED before this header is included to have what follows: for communicators, bindings, devices'
 * memory and testers. */
#if defined(HALFSTEP_ADVANCED) && !defined(HALFSTEP_H_ADVANCED)
#define HALFSTEP_H_ADVANCED

#ifdef __cplusplus
extern "C" {
#endif

/* A call in parts, so that ranks that hold parts of the tensors can agree. halfstep_run_begin() reads the gradients and
 * writes halfstep_statistics_count() integers to call->statistics. The caller may add those of all ranks, element by
 * element (MPI_SUM, all_reduce). halfstep_run_finish() makes the call that they describe. Shards that together cover
 * every element once give the bits of one process. All take one and the same call, whose weights begin does not read.
 *
 * Rules that are two_pass need a third call, halfstep_run_norms(), between them, with the statistics as begin's were
 * agreed on. It fills those from halfstep_norms_offset() on, which are then added over the ranks in the same way. It
 * does nothing for other rules, in micro-steps and at the end of a round. finish without it makes the sums by itself,
 * which needs whole tensors here (ORDER otherwise).
 *
 * Statistics of TENSOR are added over the ranks that share the tensor, and those of ROUND over all ranks among which
 * the tensors are divided (not over replicas), whether or not they share tensors: finish takes the norm from them.
 * Micro-steps of tensors are UNSUPPORTED where the scale of a state is a sum over the tensor.
 *
 * A rule with totals keeps one set of scalars for all tensors whose groups have one number in its hyper-parameter
 * "d_group". A total has as many integers as the statistics of ROUND. Where several handles have such tensors, the
 * caller adds up the integers of the first totals of each tensor (those of TENSOR say where the next tensor's are),
 * gives the sum to one tensor of each handle, with a gradient or without, and 0 to the others. All handles make every
 * step, and start from equal scalars: set those of the handle whose first scalar is largest.
 *
 * halfstep_statistics_count() and halfstep_norms_offset() read kind and tensor only, and return 0 for what is no call.
 * The statistics of ROUND are as many for every handle, NULL included. */
HALFSTEP_API int halfstep_run_begin(halfstep_optimizer *optimizer, const halfstep_call *call);
HALFSTEP_API int halfstep_run_norms(halfstep_optimizer *optimizer, const halfstep_call *call);
HALFSTEP_API int halfstep_run_finish(halfstep_optimizer *optimizer, const halfstep_call *call);
HALFSTEP_API int64_t halfstep_statistics_count(const halfstep_optimizer *optimizer, const halfstep_call *call);
HALFSTEP_API int64_t halfstep_norms_offset(const halfstep_optimizer *optimizer, const halfstep_call *call);

/* Gives one slot its memory, for hosts that keep each state as an object of their own; extra may be NULL if extra_bytes
 * is 0. The bytes are taken as they are (all zero is the initial value of every format), on the grid that the slot has.
 * Rebinding is allowed at any time between steps. Once every slot that stores something is bound, steps may be made; an
 * optimizer that stores nothing at all (sgd in f32) still needs halfstep_allocate_states(). Bytes that decode to
 * infinities or NaN harm nothing but the numbers. The residuals or error codes of a live weight that an average follows
 * (ema) are bound as extra of its gradient slot, with code NULL; they are read only. */
HALFSTEP_API int halfstep_bind_slot(halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, void *code,
                                    void *extra);

/* Where a host keeps copies of a tensor's record; NULL: nowhere. */
typedef struct halfstep_record_places {
    uint32_t struct_size;                       /* sizeof(halfstep_record_places) */
    int32_t reserved;                           /* 0 */
    float *step;                                /* of state_steps, as a float */
    int64_t *state_steps, *full_steps, *writes;
    double *scalar[HALFSTEP_MAX_SCALARS];
    double *grid[HALFSTEP_MAX_STATES];
} halfstep_record_places;

/* Keeps copies of a tensor's record: written now and whenever a number changes, for hosts that show them or whose
 * copies of a state are to be whole at any time. The library never reads them. The places replace those of an earlier
 * call and must live as long as the handle; places = NULL ends it. Errors: ARGUMENT for a scalar or a grid that the
 * tensor does not have. */
HALFSTEP_API int halfstep_bind_record(halfstep_optimizer *optimizer, int32_t tensor,
                                      const halfstep_record_places *places);
/* Binds "lr" of a group, or of all, or "gradient_scale" (group = HALFSTEP_ALL_GROUPS) to *place, where it is read when
 * a step runs: a double in the memory of the device, which work before it on the stream may write. On the processor
 * when a step is called, and then no two threads may step at once. The caller keeps it within the bounds, but for a
 * gradient_scale that is not finite: such a step is refused, as a loss scaler wants it, without a wait. NULL: as set.
 * Errors: NAME for other hyper-parameters, ARGUMENT for memory that is not the device's. */
HALFSTEP_API int halfstep_bind_hyper(halfstep_optimizer *optimizer, int32_t group, const char *name,
                                     const double *place);
/* Allocate, release and copy memory of the handle's device, aligned to 64 bytes, to be released before the handle is
 * destroyed (NULL is fine), and a copy between it and the process's, in either direction, or within it, in the order of
 * the calls, done when it returns. Errors: MEMORY, DEVICE. */
HALFSTEP_API int halfstep_device_allocate(const halfstep_optimizer *optimizer, uint64_t bytes, void **memory);
HALFSTEP_API void halfstep_device_release(const halfstep_optimizer *optimizer, void *memory);
HALFSTEP_API int halfstep_device_copy(const halfstep_optimizer *optimizer, void *to, const void *from, uint64_t bytes);
/* Returns HALFSTEP_ABI of the library that is loaded. */
HALFSTEP_API int32_t halfstep_abi(void);

/* Returns the factor of a schedule for a step, counted from 0, without an optimizer: name as in the choice "schedule".
 * Errors: NAME, RANGE. */
HALFSTEP_API int halfstep_schedule_factor(const char *name, uint64_t step, double warmup_steps, double total_steps,
                                          double final_fraction, double decay_start, double power, double *factor);

/* Returns the id that a tensor of this name has if its own is 0: a hash; 0 for NULL. */
HALFSTEP_API uint64_t halfstep_name_id(const char *name);

/* Tell the instruction sets that the library knows, in ascending order of preference; available: 1 where this build and
 * this processor have it. */
HALFSTEP_API int32_t halfstep_isa_count(void);
HALFSTEP_API const char *halfstep_isa_name(int32_t index);
HALFSTEP_API int32_t halfstep_isa_available(int32_t index);
/* Chooses one for optimizers created afterwards (NULL: back to the default). Errors: NAME. */
HALFSTEP_API int halfstep_set_isa(const char *name);
/* Returns one line if HALFSTEP_ISA is set to what is unknown or cannot run here, and so not followed; else NULL. Static
 * text. */
HALFSTEP_API const char *halfstep_isa_warning(void);
/* Writes the features of the processor that matter here, separated by spaces. */
HALFSTEP_API void halfstep_cpu_features(char *text, size_t size);

/* Writes raw words of a generator ("lattice", "mixer", "philox7"): n 32-bit words from pair `first` of the stream
 * (seed, id, write, slot). "lattice" gives those of element formats; write then counts the writes of the slot itself
 * (below 2^63) and words of one element are related within 256 of them. Errors: NAME. For statistical testers. */
HALFSTEP_API int halfstep_random_words(const char *generator, uint64_t seed, uint64_t id, uint64_t write, int32_t slot,
                                       uint64_t first, uint32_t *out, size_t n);
/* Rounds n floats to BF16 with the library's stochastic rule and the given words (one word serves elements 2k and
 * 2k+1). */
HALFSTEP_API int halfstep_bf16_stochastic(const float *in, uint16_t *out, size_t n, const uint32_t *words);

#ifdef __cplusplus
}
#endif
#endif
