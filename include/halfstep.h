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
 * CONTENTS. The sections: make an optimizer, describe its tensors, give states memory, step, read and save, rules and
 * formats, threads, devices. What few programs need comes last, behind HALFSTEP_ADVANCED. The header includes only
 * <stddef.h> and <stdint.h>, and compiles alone as C11 and C++. Its types are fixed-width integers, float, double and
 * pointers, so that a binding can mirror it line by line.
 *
 * WORDS. A *rule* is the arithmetic of one optimizer (adamw, lion, ...). A *format* is how one tensor is stored. A
 * *recipe* names both: "rule/weight format/state format", with "+" between the formats of several states
 * ("adamw/bf16-sr/int8+bf16-sr"). Parts left out take defaults. Weights are f32. States have the rule's own default
 * formats if it has any, otherwise f32 beside f32 weights and bf16-sr beside others. A *slot* is one stored tensor of a
 * parameter: its weight, its gradient, each of its states. A slot may have a second plane of bytes, its *extra*: the
 * Kahan residual, the error code, or the scales of a block format.
 *
 * ERRORS. Every function that can fail returns int: HALFSTEP_OK, or a negative code below. halfstep_strerror() says
 * what kind of error a code is. Every failure sets a text that says what was wrong, which halfstep_error_detail()
 * returns. A failed call changes nothing. The library never prints, exits or aborts, and allocates nothing inside a
 * step.
 *
 * STRUCTURES begin with struct_size, which the caller sets to the sizeof of its header's structure. A smaller size is
 * that of an older header: its missing fields have their defaults, or are not filled in. A larger size is accepted if
 * all bytes that this library does not know are zero, else ARGUMENT. Zero is the default of every field that says so;
 * names and sizes have none, and without them a call is refused.
 *
 * BITS. The same inputs, seed and counters give the same bits in weights and states on every instruction set, compiler,
 * thread count and shard layout. docs/numerics.md states the contract.
 *
 * THREADS. Different handles may be used at the same time. On one handle, calls about different single tensors may run
 * at the same time (HALFSTEP_CALL_TENSOR). The caller serialises all other calls on one handle. After fork() the child
 * may go on with its copy of a handle on the processor. The caller's floating-point mode (rounding, flushing of
 * subnormals) has no effect on results, and the library leaves it unchanged.
 *
 * DEVICES. A handle computes on the processor, or on a device (options.device). On a device its states, weights and
 * gradients are memory of that device, and a step is submitted to a stream without waiting for it. See "Devices" below
 * and docs/gpu.md.
 *
 * MEMORY. Weights and gradients always belong to the caller and need only the alignment of their element. States belong
 * to the caller (halfstep_bind_states, halfstep_bind_slot) or to the library (halfstep_allocate_states). Buffers of
 * many megabytes are slower if they start at equal offsets modulo large powers of two. The library's own do not. */
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

/* Returns the version of the loaded library, as major * 10000 + minor * 100 + patch. */
HALFSTEP_API int32_t halfstep_version(void);

/* ---- Error codes ------------------------------------------------------------------------------------------------- */

/* Values are pinned and never reused. */

#define HALFSTEP_OK                  0 /* success */
#define HALFSTEP_ERROR_ARGUMENT    -10 /* NULL where a pointer is needed, a wrong struct_size, an index out of range */
#define HALFSTEP_ERROR_NAME        -11 /* an unknown rule, format, hyper-parameter, choice, instruction set ... */
#define HALFSTEP_ERROR_RANGE       -12 /* a number outside the bounds that the matching info function gives */
#define HALFSTEP_ERROR_SHAPE       -13 /* rows, columns or a shard that do not fit together or overflow */
#define HALFSTEP_ERROR_DUPLICATE   -14 /* two tensors with one id or one name */
#define HALFSTEP_ERROR_ORDER       -15 /* a call at the wrong time: a step before states exist, a tensor after them */
#define HALFSTEP_ERROR_UNSUPPORTED -20 /* a combination that has no meaning, e.g. a block format for a gradient */
#define HALFSTEP_ERROR_MEMORY      -30 /* the operating system gives no more memory */
#define HALFSTEP_ERROR_DEVICE      -31 /* the device or its driver is missing, too old, unusable or has failed. After a
                                          failure that the driver calls lasting, every handle on the device refuses */
#define HALFSTEP_ERROR_FORMAT      -40 /* halfstep_io: a corrupt file */
#define HALFSTEP_ERROR_MISMATCH    -41 /* halfstep_io: a sound file that belongs to another configuration */
#define HALFSTEP_ERROR_IO          -42 /* halfstep_io: the operating system refused */
#define HALFSTEP_NONFINITE         -50 /* not a failure of the call: a gradient is NaN, infinite or too large, or their
                                          norm is not finite. The step is refused and no bit changes */

/* Returns a static text for a code, never NULL. */
HALFSTEP_API const char *halfstep_strerror(int code);

#define HALFSTEP_MAX_STATES  6 /* states of a rule */
#define HALFSTEP_MAX_SCALARS 4 /* numbers that a rule keeps for each tensor */

/* ---- Make an optimizer ------------------------------------------------------------------------------------------- */

typedef struct halfstep_optimizer halfstep_optimizer;

/* Runs tasks on a host's own threads, in place of the library's pool. run(host, task, argument, n) must call
 * task(argument, i) once for every i in 0 .. n - 1, and return when all are done. The order and the threads are free;
 * the calls may also follow one another on one thread. While run waits, it must not begin another call on the same
 * handle on a thread that it borrows. No exception, panic or longjmp() may leave run: the step would stay half done. */
typedef void (*halfstep_task)(void *argument, int64_t index);
typedef void (*halfstep_run_tasks)(void *host, halfstep_task task, void *argument, int64_t n);

typedef struct halfstep_options {
    uint32_t struct_size;      /* sizeof(halfstep_options) */
    int32_t threads;           /* 0: halfstep_default_threads(), asked once; else 1 .. 1024 */
    uint64_t seed;             /* of the random bits */
    halfstep_run_tasks run;    /* NULL: the library's own pool */
    void *host;                /* first argument of run; NULL without run */
    const char *device;        /* NULL or "cpu"; "cuda": the first GPU; "cuda:N": number N, from 0 */
    void *stream;              /* of the device, a CUstream (cudaStream_t); NULL: its default stream */
} halfstep_options;

/* Makes an optimizer without groups or tensors. options may be NULL. After an error *optimizer is NULL. Reads the
 * environment variables of the library; no step does. Errors: NAME for an unknown device, or for a variable HALFSTEP_*
 * with a value that is not known, ARGUMENT for a stream without a device or a host without run, RANGE, MEMORY. DEVICE
 * if the device cannot be used. halfstep_error_detail(NULL) says why. */
HALFSTEP_API int halfstep_create(const halfstep_options *options, halfstep_optimizer **optimizer);
/* Frees everything that the library allocated for an optimizer. NULL is allowed. */
HALFSTEP_API void halfstep_destroy(halfstep_optimizer *optimizer);
/* Returns a text about the last error or refused step on this handle, or "" if there was none. If the calling thread's
 * last error was on this handle, the text is about that one, otherwise about the last error of any thread. For NULL:
 * returns the text of the thread's last error if that was in a call without a handle: halfstep_create(), a function
 * that takes none, or one that was given NULL. The text is valid until the thread's next call. */
HALFSTEP_API const char *halfstep_error_detail(const halfstep_optimizer *optimizer);

#define HALFSTEP_ALL_GROUPS (-1) /* in place of a group: all of them, or the optimizer itself */

/* Adds a group, which is a recipe with its hyper-parameters. Writes its index to *group. Errors: NAME and UNSUPPORTED
 * as in halfstep_recipe_full(), ORDER once the states exist or an lr is bound. */
HALFSTEP_API int halfstep_add_group(halfstep_optimizer *optimizer, const char *recipe, int32_t *group);
HALFSTEP_API int32_t halfstep_group_count(const halfstep_optimizer *optimizer);
/* Writes the full form of a group's recipe, as halfstep_recipe_full() does. 64 bytes are enough for any. */
HALFSTEP_API int halfstep_get_group_recipe(const halfstep_optimizer *optimizer, int32_t group, char *text, size_t size);
/* Sets a hyper-parameter, a double, by name. It is checked against its bounds now and read at each step. NaN is out of
 * bounds. group = HALFSTEP_ALL_GROUPS sets those of the optimizer ("gradient_scale", "clip_norm"), which have no group.
 * For any other name it sets every group that there is by then and whose rule has it. docs/c.md has the names and
 * defaults of each rule's own. `halfstep info RULE` prints what they mean. Common to all rules:
 *   lr               learning rate; 0 changes no bit of any weight
 *   weight_decay     coefficient of the group's decay mode
 *   reference_lr     "fully-decoupled" decay shrinks weights by (lr / reference_lr) * weight_decay. 0 (not set) stands
 *                    for the group's lr as it was first set: a step with an lr more than ten times that is refused
 *                    (RANGE). So is a step whose decay is above 1
 *   maximize         1: ascend
 *   centralize       0 .. 1: subtracts this fraction of the gradient's mean over all dimensions but the first. Acts on
 *                    tensors of two or more dimensions (Yong et al. 2020)
 *   cautious         1: moves only elements whose update has the sign of their gradient. Their update is divided by
 *                    their fraction of the tensor (at least 1/1000). Decay is unchanged (Liang et al. 2024). Only for
 *                    rules with halfstep_rule_info.cautious. A step then sums over each tensor first
 *   warmup_steps, total_steps, final_fraction, decay_start, power    of the schedule. A step under one that falls is
 *                    refused (RANGE) while total_steps is 0 or less than warmup_steps
 *   final_decay_fraction    of decay_schedule, which shares total_steps, decay_start and power with the schedule
 *   gradient_scale   (optimizer) gradients are multiplied by it first, e.g. 1 / loss scale
 *   clip_norm        (optimizer) c: gradients are scaled by min(1, c / (norm + 1e-6)). The norm is over all tensors,
 *                    after gradient_scale. 0 turns clipping off
 * Errors: NAME, whose text lists the names that the rule has; RANGE; UNSUPPORTED if the rule cannot be cautious;
 * ARGUMENT if the name is the optimizer's and a group is given. ORDER if there is no group yet. ORDER also if the
 * states exist and the value changes which states or sums there are: cautious or sgd's momentum, from or to 0, and
 * prodigy's d_group. */
HALFSTEP_API int halfstep_set_hyper(halfstep_optimizer *optimizer, int32_t group, const char *name, double value);
/* Writes the present value to *value. For HALFSTEP_ALL_GROUPS there are those of the optimizer only. */
HALFSTEP_API int halfstep_get_hyper(const halfstep_optimizer *optimizer, int32_t group, const char *name,
                                    double *value);
/* Sets a choice, whose values are names. Per group (HALFSTEP_ALL_GROUPS sets all that there are by then, and is refused
 * with ORDER if there is none):
 *   decay      "l2": g += weight_decay * w; "decoupled": w -= lr * weight_decay * w (Loshchilov & Hutter 2019);
 *              "fully-decoupled": as "reference_lr" above; "proximal": w = (w - lr * update) / (1 + lr * weight_decay)
 *              (Xie et al. 2022); "cautious": decoupled, but not for elements that the update alone moves away from 0
 *              (Chen et al. 2025). Only for rules with halfstep_rule_info.cautious_decay
 *   schedule   a factor on lr, by the group's count s of accepted steps, from 0. With W, T, F, S for warmup_steps,
 *              total_steps, final_fraction, decay_start: (s + 1) / W while s < W. Then, with r = (s - W) / (T - W):
 *                "constant"  1
 *                "linear"    F + (1 - F) (1 - r)
 *                "cosine"    F + (1 - F) (1 + cos(pi r)) / 2
 *                "wsd"       1 while s < D = floor(S T); then F + (1 - F) (1 - sqrt(r)), r = (s - D) / (T - D)
 *              F from step T on. "inverse-power", of the adamw_bfloat16 package: x = (s + 2) / max(W, 1), from 1 on
 *              x^power
 *   decay_schedule    the same as a factor on weight_decay, without warm-up, and F is final_decay_fraction
 *   ns_coefficients  muon's coefficients of each iteration: "given" (ns_a, ns_b, ns_c), "polar-express" (Amsel et al.
 *              2025), "deepseek-v4", "dion". Lists have a least number of iterations; ns_steps counts if it is more.
 *              This is a hyper-parameter, and a choice because its values have names
 *   ns_form    likewise: "standard", or "gram", which makes fewer products for matrices with one side over 1.5 times
 *              the other (docs/numerics.md 4)
 *   match_rms, normalize_rows   likewise (docs/guides/muon.md)
 * Per optimizer (group = HALFSTEP_ALL_GROUPS):
 *   scan       "scan": a pass over the gradients comes before the first write; a gradient that is not finite refuses
 *              the whole step. "per-tensor": refuses only the tensors with such gradients and steps the others; the
 *              call still returns HALFSTEP_NONFINITE. "known-finite": no check, the caller guarantees finite gradients
 *   clip       in gradient release. "delayed": clips by the norm of the round before; until a round has had a norm, by
 *              each tensor's own. "per-tensor": by each tensor's own norm
 *   generator  "lattice", "mixer" or "philox7": the source of random bits (docs/random.md)
 *   missing    "skip": a step leaves tensors with a NULL gradient alone; "error": it fails
 * A step is also refused if an effective gradient g has |g| >= 2^62, because its square would leave fp32. */
HALFSTEP_API int halfstep_set_choice(halfstep_optimizer *optimizer, int32_t group, const char *choice,
                                     const char *value);
HALFSTEP_API const char *halfstep_get_choice(const halfstep_optimizer *optimizer, int32_t group, const char *choice);
/* Writes the lr that the group's next step will use, "lr" times the schedule's factor, to *lr. RANGE if such a step is
 * refused. */
HALFSTEP_API int halfstep_current_lr(const halfstep_optimizer *optimizer, int32_t group, double *lr);

/* ---- Describe the tensors ---------------------------------------------------------------------------------------- */

/* Describes a tensor and the part of it held here. A tensor is rows x row_length: dimension 0, and everything after it
 * flattened. A tensor of one dimension has n rows of length 1. From 4096 elements up, 1 row of length n is allowed too,
 * which makes flat buffers eligible for block formats. A stack of vectors, such as the biases of L layers as one tensor
 * of L x C, counts as a matrix: it gets block formats. Describe it with ndim = 1 and rows = L * C to have it treated as
 * vectors are. The part held here is a rectangle. Its elements are contiguous, row by row, in the weight, gradient and
 * state buffers. Blocks, random bits and eligibility for block formats depend on the shape of the whole tensor, never
 * on the part.
 *
 * Rules with halfstep_rule_info.matrix step matrices. A tensor of two or more dimensions is one matrix, or a stack of
 * matrices with matrix_rows rows each. A stack of shape [E, M, N] has E * M rows of N, and its matrix_rows is M. It has
 * one id, one set of counters and one verdict. A matrix with a single row or column is stepped as other tensors are.
 * `split` cuts each of them into blocks of rows, which are then the matrices: q, k and v in one weight of 6144 rows
 * have split = {4096, 1024, 1024}. A part of a tensor that is stepped as matrices must consist of whole matrices. Other
 * rules ignore matrix_rows and split. */
#define HALFSTEP_MAX_SPLIT 16
typedef struct halfstep_tensor {
    uint32_t struct_size;     /* sizeof(halfstep_tensor) */
    int32_t group;            /* its group, from halfstep_add_group(); 0: the first */
    const char *name;         /* copied; errors and files name the tensor by it. UTF-8, and no other tensor's */
    uint64_t id;              /* keys its random bits; 0: a hash of the name, the same on every rank */
    int32_t ndim;             /* dimensions of the original tensor, 0 for a scalar */
    int32_t may_be_empty;     /* 1: the tensor, or the part held here, may have no elements. 0: that is refused,
                                 because a size was probably forgotten */
    int64_t rows, row_length; /* the whole tensor. row_length 0 with ndim 0 or 1: 1 */
    int64_t first_row, n_rows, first_column, n_columns; /* the part held here; all four zero: the whole */
    const char *gradient;     /* format of its gradients: "f32", "bf16", "f16" */
    int64_t matrix_rows;      /* rows of each matrix, a divisor of rows; 0: the tensor is one matrix */
    int64_t split[HALFSTEP_MAX_SPLIT]; /* rows of each block, at least 2; their sum is matrix_rows, or rows where that
                                          is 0. A 0 ends the list; all 0: one block */
} halfstep_tensor;

/* Adds a tensor and writes its index to *index. Errors: SHAPE (names the tensor, and the cut that is not on a block
 * boundary), DUPLICATE for the name or the id of another tensor, NAME for an unknown format and for a name that no file
 * can hold, ARGUMENT for a missing name or format, ORDER, UNSUPPORTED. */
HALFSTEP_API int halfstep_add_tensor(halfstep_optimizer *optimizer, const halfstep_tensor *tensor, int32_t *index);
HALFSTEP_API int32_t halfstep_tensor_count(const halfstep_optimizer *optimizer);
/* Describes a tensor as it was added, with its actual id, part and matrix_rows in place of zeros. name lives as long as
 * the handle. matrix_rows is `rows`, and split is empty, for rules that ignore them. A split into one block is empty.
 * The caller sets tensor->struct_size. */
HALFSTEP_API int halfstep_get_tensor(const halfstep_optimizer *optimizer, int32_t index, halfstep_tensor *tensor);
/* Returns the index of the tensor with this name, or -1. */
HALFSTEP_API int32_t halfstep_tensor_find(const halfstep_optimizer *optimizer, const char *name);

/* ---- Slots and their memory -------------------------------------------------------------------------------------- */

#define HALFSTEP_SLOT_WEIGHT   0
#define HALFSTEP_SLOT_GRADIENT 1
#define HALFSTEP_SLOT_STATE    2 /* + index of the state */

typedef struct halfstep_slot_info {
    uint32_t struct_size;      /* set by the caller: sizeof(halfstep_slot_info) */
    int32_t format;            /* row of halfstep_get_format_info(); -1: this slot stores nothing */
    const char *name;          /* "weight", "gradient", or the state's name, e.g. "exp_avg" */
    uint64_t code_bytes;       /* of the part held here */
    uint64_t extra_bytes;      /* likewise, of the extra plane */
    int64_t blocks_per_row;    /* of the part held here, for block formats of geometry ROWS */
    int32_t fell_back;         /* 1: rows are too short, or dimensions too few, for the block format of the recipe */
    int32_t grid;              /* 1: stored on a grid: halfstep_record.grid */
    void *code, *extra;        /* where it is bound; NULL for the codes of weights and gradients */
    int64_t rows, columns;     /* shape of what the slot stores for the part held here: a vector over rows is rows x 1,
                                  one over columns is matrices x columns. halfstep_read_slot() and
                                  halfstep_write_slot() use this shape */
    int32_t precise;           /* 1: in the format of halfstep_rule_info.precise_format, not in the recipe's */
    int32_t reserved;
} halfstep_slot_info;

/* Describes a slot of a tensor: HALFSTEP_SLOT_*. The caller sets info->struct_size. Errors: ARGUMENT. */
HALFSTEP_API int halfstep_get_slot_info(const halfstep_optimizer *optimizer, int32_t tensor, int32_t slot,
                                        halfstep_slot_info *info);

/* Writes to *bytes how much memory halfstep_bind_states() needs. That holds all that is stored beside weights and
 * gradients: states, their scales, residuals and error codes. Every plane starts on 64 bytes. */
HALFSTEP_API int halfstep_state_bytes(halfstep_optimizer *optimizer, uint64_t *bytes);
/* Binds the states to memory and sets them to their initial values: zero bytes, and evenly spread error codes of packed
 * weights (docs/formats.md). The memory is aligned to 64 bytes, has at least halfstep_state_bytes(), and stays the
 * caller's until the handle is destroyed. No tensor or group can be added afterwards. Errors: ORDER if the states have
 * memory already, because steps that they have counted would be lost. */
HALFSTEP_API int halfstep_bind_states(halfstep_optimizer *optimizer, void *memory, uint64_t bytes);
/* Does the same with memory of the library: in huge pages where large, with slots staggered. */
HALFSTEP_API int halfstep_allocate_states(halfstep_optimizer *optimizer);

/* ---- Step -------------------------------------------------------------------------------------------------------- */

/* Makes one update of every tensor. weights[i] and gradients[i] belong to tensor i and are read anew at each call.
 * Declare the arrays as void *weights[n] and const void *gradients[n], whatever the elements are: any pointer to
 * numbers can be stored there without a cast. A float ** is another type, which compilers warn of or refuse. A NULL
 * gradient leaves that tensor's weights, states and counters alone, but the call still counts as a step of every
 * schedule. For a part without elements pass any non-NULL address, so that its counters keep pace with those of the
 * other shards. NULL weights with a gradient and n > 0 are an error. Gradients are never written. Returns
 * HALFSTEP_NONFINITE, with nothing changed, if a gradient is not finite. Errors: ORDER without tensors or before their
 * states exist. UNSUPPORTED for a part of a tensor, unless nothing has to be known of the rest of it: scan
 * "known-finite", no clipping, a rule of one pass. */
HALFSTEP_API int halfstep_step(halfstep_optimizer *optimizer, void *const *weights, const void *const *gradients);

/* Values of halfstep_call.kind: what a call covers. */
#define HALFSTEP_CALL_STEP   0 /* every tensor, as halfstep_step() does */
#define HALFSTEP_CALL_TENSOR 1 /* one tensor, as soon as its gradient exists (gradient release) */
#define HALFSTEP_CALL_ROUND  2 /* the end of a round, in which tensors had their TENSOR calls */

/* Where a step in advance puts its results. */
typedef struct halfstep_ahead {
    void *weight;                 /* the new weight: as many bytes as the weight */
    void *states;                 /* the new states: halfstep_ahead_bytes() of the tensor, aligned to 64 bytes. Any
                                     other address if these are 0 */
} halfstep_ahead;

typedef struct halfstep_call {
    uint32_t struct_size;         /* sizeof(halfstep_call) */
    int32_t kind;                 /* HALFSTEP_CALL_* */
    int32_t tensor;               /* its index, for TENSOR; 0 for others */
    int32_t micro;                /* 1: a micro-step: gradients go into the states, and weights do not change */
    void *const *weights;         /* for STEP, a pointer for each tensor; for TENSOR, one pointer. Not read in a
                                     micro-step */
    const void *const *gradients; /* as weights; NULL for ROUND */
    int64_t *statistics;          /* for halfstep_run_begin(), _norms() and _finish(); NULL for halfstep_run() */
    const halfstep_ahead *ahead;  /* for TENSOR, one: step in advance; for STEP, one for each tensor; NULL: none */
} halfstep_call;

/* Makes the call that `call` describes, in one piece.
 *   STEP    does what halfstep_step() does.
 *   TENSOR  makes one update of one tensor. If its gradient is not finite, leaves the tensor alone and returns
 *           HALFSTEP_NONFINITE. UNSUPPORTED for parts, as in halfstep_step(), and for rules with totals.
 *   ROUND   ends a round: advances the schedules and the norm of "delayed" clipping. Call it when all tensors of the
 *           round have had their update. UNSUPPORTED if a round with clipping had parts of tensors. HALFSTEP_NONFINITE
 *           if the norm of the round is not finite; the round goes on.
 *   micro   of STEP and TENSOR: puts the gradients into the states and leaves the weights alone (optimizer
 *           accumulation). The last gradient of a step comes without micro. Decay rates act on every micro-step. Second
 *           moments see the squares of micro-gradients. Gradients are not divided by their number, because moments
 *           average. No clipping. Bias corrections count micro-steps; schedules, Lookahead and averages of weights
 *           count steps. UNSUPPORTED if micro-gradients would be lost (sgd and rmsprop without momentum, schedulefree,
 *           ema). UNSUPPORTED also for l2 decay, which only the last gradient would get, and for
 *           matrices whose states include vectors over rows and columns. */
HALFSTEP_API int halfstep_run(halfstep_optimizer *optimizer, const halfstep_call *call);

/* Steps in advance: a tensor is stepped as soon as its gradient exists, before it is known whether the step is made.
 *
 * TENSOR with `ahead` computes what the next STEP would make of the tensor if all gradients are finite and nothing is
 * clipped, under the present hyper-parameters, gradient scale and counters. The new weight and the new states go to
 * `ahead`. Nothing that can be read changes. The tensor's statistics are kept, so that the STEP need not scan it.
 * Further such calls about other tensors may run at the same time. A second one about the same tensor replaces the
 * first. HALFSTEP_NONFINITE if the gradient is not finite; there is no result then. In a micro-step only the states are
 * computed. ARGUMENT in the parts of a call (halfstep_run_begin()), and for ROUND.
 *
 * STEP with `ahead`, also in its parts: for each tensor whose ahead[i].weight is not NULL, the new weight is there
 * afterwards, and weights[i] is as it was. This holds whether the result stands, is made again, or is not used because
 * the tensor or the step is skipped; the weight is then a copy. The new states are in their own memory, as always. The
 * result stands if everything that it was made with equals what the step decides: lr and all other hyper-parameters,
 * scale, clip factor, counters, micro. Otherwise the tensor is stepped again. The bits are those of a plain STEP in
 * every case. ahead[i].states NULL: there is no result, or it may not be used. Pass NULL if the weight, the states or
 * the gradient were written to after TENSOR. A tensor whose ahead[i].weight is NULL has a plain step, as without
 * `ahead`. A micro-step leaves weights alone, so it looks at ahead[i].states only. Every STEP ends by forgetting all
 * results. A STEP that is refused leaves the memory of the results undefined, apart from the weights. */

/* Writes to *bytes how much memory halfstep_ahead.states needs. UNSUPPORTED for a tensor that cannot be stepped in
 * advance: it is stepped as matrices, has vectors over rows and columns, or needs sums over itself. A rule, a cautious
 * group or a state with one scale may need such sums. On other devices than the processor, and with states in a
 * storage, no tensor can be. */
HALFSTEP_API int halfstep_ahead_bytes(const halfstep_optimizer *optimizer, int32_t tensor, uint64_t *bytes);
/* Returns how many steps made a tensor again although its result was at hand. */
HALFSTEP_API uint64_t halfstep_redone_steps(const halfstep_optimizer *optimizer);

/* Adds scale * gradient to an accumulator of one tensor, which is the gradient of a later step. Formats of the
 * accumulator: "f32", "bf16", "bf16-sr", "f16". It has the shape of the part held here. "bf16-sr" consumes random bits
 * of the tensor's gradient slot. Values that are not finite pass through, because the step will judge them. Groups and
 * tensors may still be added afterwards. */
HALFSTEP_API int halfstep_accumulate(halfstep_optimizer *optimizer, int32_t tensor, void *accumulator,
                                     const char *format, const void *gradient, const char *gradient_format,
                                     double scale);

/* ---- Read and save ----------------------------------------------------------------------------------------------- */

/* The largest value of a counter that may be set. */
#define HALFSTEP_MAX_COUNT INT64_MAX

/* Values of halfstep_record.kind: what a record describes. */
#define HALFSTEP_RECORD_OPTIMIZER 0
#define HALFSTEP_RECORD_GROUP     1
#define HALFSTEP_RECORD_TENSOR    2

/* Holds all that a checkpoint keeps beside weights, slots, hyper-parameters and choices. The fields of other kinds are
 * 0. */
typedef struct halfstep_record {
    uint32_t struct_size;  /* sizeof(halfstep_record) */
    int32_t kind;          /* HALFSTEP_RECORD_* */
    int32_t index;         /* of the group or of the tensor */
    int32_t reserved;      /* 0 */

    /* OPTIMIZER */
    uint64_t seed;         /* of the random bits */
    uint64_t skipped_steps; /* steps refused so far because a gradient was not finite or too large. With scan
                               "per-tensor" and in release, counts single tensors */
    double gradient_norm;  /* the global norm, after gradient_scale and before clipping, of the last step or round that
                              computed it (clip_norm > 0), else 0. "Delayed" clipping uses it */

    /* GROUP */
    uint64_t steps;        /* accepted steps so far; its schedule uses them */

    /* TENSOR */
    uint64_t id;           /* keys its random bits; 0 in halfstep_set_record() keeps the tensor's own */
    uint64_t state_steps;  /* updates of its states (bias correction) */
    uint64_t full_steps;   /* updates of its weight */
    uint64_t writes;       /* passes that may have drawn random bits: updates of its states and stochastic
                              accumulations. writes - state_steps is the number of the latter */
    double scalar[HALFSTEP_MAX_SCALARS]; /* the rule's numbers, in the order of halfstep_rule_info.scalar_name. Either
                                            state (adamw-delayed's accumulated_decay), or results of the last update
                                            (lamb's weight_norm, update_norm and trust_ratio). Tensors that share totals
                                            (prodigy) have one set: that of the tensor whose first scalar is largest */
    double grid[HALFSTEP_MAX_STATES]; /* for states with halfstep_slot_info.grid: the factor on the stored second
                                         moment, an fp32 number in [1/4, 1]. It starts at 1. Each write of the state
                                         multiplies it by the state's decay rate (a maximum has none). It is multiplied
                                         by 4 when it is below 1/4. It is equal on all parts of a tensor. It belongs to
                                         the bytes of the slot: set both or neither. Bytes from checkpoints without this
                                         number have 1 */
} halfstep_record;

/* Reads a record. The caller sets its kind and index. */
HALFSTEP_API int halfstep_get_record(const halfstep_optimizer *optimizer, halfstep_record *record);
/* Restores a record. To change one field, get the record first. Errors: RANGE for a count above HALFSTEP_MAX_COUNT, or
 * for a number that no update can produce; DUPLICATE for the id of another tensor; ARGUMENT for a field of another kind
 * that is not 0, and for a scalar or a grid that the tensor does not have. */
HALFSTEP_API int halfstep_set_record(halfstep_optimizer *optimizer, const halfstep_record *record);

/* Return skipped_steps and gradient_norm of the optimizer's record. */
HALFSTEP_API uint64_t halfstep_skipped_steps(const halfstep_optimizer *optimizer);
HALFSTEP_API double halfstep_gradient_norm(const halfstep_optimizer *optimizer);
/* Returns the name of the first offending tensor of the last refusal, or "" if this process knows of none. The tensor
 * may be on another rank. Sets *too_large to 1 if its gradient was finite, but its product with gradient_scale 2^62 or
 * more, else to 0. too_large may be NULL. */
HALFSTEP_API const char *halfstep_nonfinite_tensor(const halfstep_optimizer *optimizer, int32_t *too_large);
/* Counts the elements of a 16-bit weight that are at the end of their format's range, for example +-65504 in IEEE half.
 * Weights saturate there instead of becoming infinite. `weight` is the caller's buffer. Gives 0 for formats of other
 * widths. */
HALFSTEP_API int halfstep_saturated(const halfstep_optimizer *optimizer, int32_t tensor, const void *weight,
                                    uint64_t *count);

/* Decode (read) or encode (write) rows of the part held here as fp32. Rows first_row .. first_row + n_rows - 1 count
 * from the part's first row, and have n_columns numbers each (halfstep_slot_info.columns for a vector). `data` is the
 * caller's buffer for a weight or a gradient, and NULL for a state. Writes round to nearest (ties away from zero if the
 * format is stochastic), saturate, and consume no random bits. A weight with a residual or error code gets both parts.
 * A second moment with a grid is stored on its present grid. A second moment's -0 is stored as +0. Errors: RANGE for a
 * value that is not finite in a block format or a second moment, and for a negative second moment. */
HALFSTEP_API int halfstep_read_slot(const halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, const void *data,
                                    int64_t first_row, int64_t n_rows, float *out);
HALFSTEP_API int halfstep_write_slot(halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, void *data,
                                     int64_t first_row, int64_t n_rows, const float *in);
/* Decode or encode the weights of all tensors in one call, for programs that compute in fp32. weights[i] and out[i] or
 * in[i] belong to tensor i. All of its rows are read or written, as by the functions above. Where the format is f32,
 * out[i] may be weights[i]. `in` is not written. Large weights are shared out among the threads of a step, as by the
 * functions above. Errors: ARGUMENT for a NULL pointer of a tensor with elements, before anything is written. */
HALFSTEP_API int halfstep_read_weights(const halfstep_optimizer *optimizer, void *const *weights, float *const *out);
HALFSTEP_API int halfstep_write_weights(halfstep_optimizer *optimizer, void *const *weights, float *const *in);
/* Reads the weights to evaluate, decoded as by halfstep_read_slot(). For schedulefree that is the average x, for other
 * rules the weights themselves. */
HALFSTEP_API int halfstep_read_average(const halfstep_optimizer *optimizer, int32_t tensor, const void *weight,
                                       int64_t first_row, int64_t n_rows, float *out);

/* Adds up the bytes held here for the whole optimizer. *weights and *gradients are the bytes of their codes,
 * *weight_extras the extra planes of weights. *states are the states with their scales and, once the states exist, the
 * workspace for matrices (muon). *fell_back is the number of tensors that fell back from a block format. Any pointer
 * may be NULL. */
HALFSTEP_API int halfstep_memory(const halfstep_optimizer *optimizer, uint64_t *weights, uint64_t *gradients,
                                 uint64_t *weight_extras, uint64_t *states, int32_t *fell_back);

/* ---- Rules, formats, choices ------------------------------------------------------------------------------------- */

/* Roles of a slot. A format must be able to serve its slot's role. */
#define HALFSTEP_ROLE_WEIGHT   1 /* as a state: stored in the weight's format, starts as a copy of the weight */
#define HALFSTEP_ROLE_GRADIENT 2 /* as a state: any format for either sign but block formats */
#define HALFSTEP_ROLE_SIGNED   4 /* a state of either sign */
#define HALFSTEP_ROLE_NONNEG   8 /* a state that is never negative, such as a second moment */

/* Geometries of block formats: which elements share a scale. */
#define HALFSTEP_GEOMETRY_ROWS   0 /* a stretch of elements within a row; the last of a row may be short */
#define HALFSTEP_GEOMETRY_FLAT   1 /* a stretch of elements of the flattened tensor, whole stretches only */
#define HALFSTEP_GEOMETRY_TENSOR 2 /* the whole tensor */
#define HALFSTEP_GEOMETRY_PACKED 3 /* of weights: as ROWS, but the scale lies before its codes in the main plane, and
                                      codes of elements beyond the end of a row are stored as 0 */

/* Extents of a state: what it has a number for. Vectors are fp32 in every recipe. Only matrices have them: tensors of
 * two or more dimensions with more than one row and column. */
#define HALFSTEP_EXTENT_ELEMENTS 0
#define HALFSTEP_EXTENT_ROWS     1 /* one number for each row, such as a factored second moment */
#define HALFSTEP_EXTENT_COLUMNS  2 /* one for each column */

typedef struct halfstep_rule_info {
    uint32_t struct_size;   /* set by the caller: sizeof(halfstep_rule_info) */
    int32_t id;             /* pinned */
    const char *name;
    const char *title;      /* one line for people */
    int32_t states;         /* 0 .. HALFSTEP_MAX_STATES. Some hyper-parameters make a state needless (sgd without
                               momentum has none) */
    int32_t state_role[HALFSTEP_MAX_STATES];
    const char *state_name[HALFSTEP_MAX_STATES];
    int32_t hypers;         /* number of hyper-parameters, for halfstep_get_hyper_info() */
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
    int32_t totals;         /* number of sums over all tensors that come before any update; above 0, no tensor is
                               stepped alone */
    int32_t cautious;       /* 1: the hyper-parameter of that name may be 1 */
    /* For a state that is a running maximum or is subtracted while a hyper-parameter is not 0: that hyper-parameter,
     * and the format that then replaces a block format, whose errors would not average out. NULL for other states. */
    const char *precise_if[HALFSTEP_MAX_STATES];
    const char *precise_format[HALFSTEP_MAX_STATES];
    int32_t cautious_decay; /* 1: the decay mode "cautious" is allowed */
    int32_t reserved;       /* 0 */
} halfstep_rule_info;

typedef struct halfstep_format_info {
    uint32_t struct_size;   /* set by the caller: sizeof(halfstep_format_info) */
    int32_t id;
    const char *name;
    const char *title;
    int32_t roles;          /* sum of HALFSTEP_ROLE_* that it may serve */
    int32_t code_bits;      /* bits per element of the main plane */
    int32_t extra_bits;     /* bits per element of the extra plane (Kahan residual, error code), or 0. PACKED formats
                               store it for whole blocks */
    int32_t block;          /* elements that share one scale, or 0 */
    int32_t scale_bytes;    /* bytes of one scale, or 0 */
    int32_t stochastic;     /* 1: its writes consume random bits */
    const char *code_dtype; /* safetensors dtype of the main plane, e.g. "BF16"; "U8" holds two 4-bit codes */
    const char *extra_dtype;/* of the extra plane (residuals, error codes, scales), or NULL */
    int32_t geometry;       /* HALFSTEP_GEOMETRY_*, for block formats */
    int32_t grid;           /* 1: second moments are stored on a grid that decays with them: halfstep_record.grid */
} halfstep_format_info;

typedef struct halfstep_hyper_info {
    uint32_t struct_size;   /* set by the caller: sizeof(halfstep_hyper_info) */
    const char *name;
    const char *title;      /* the title of a switch, which is 0 or 1, begins with "0:" or "1:" and the meaning of that
                               value */
    double initial;
    double minimum;         /* inclusive */
    double maximum;         /* inclusive unless exclusive_maximum */
    int32_t exclusive_maximum;
    int32_t per_optimizer;  /* 1: belongs to the optimizer, set with group = HALFSTEP_ALL_GROUPS only */
} halfstep_hyper_info;

/* Describe the tables of rules and formats. Rows are numbered 0 .. count - 1 in the order of the tables. Files store
 * ids, not rows. _find returns the row or -1. */
HALFSTEP_API int32_t halfstep_rule_count(void);
HALFSTEP_API int halfstep_get_rule_info(int32_t row, halfstep_rule_info *info);
HALFSTEP_API int32_t halfstep_rule_find(const char *name);
HALFSTEP_API int32_t halfstep_format_count(void);
HALFSTEP_API int halfstep_get_format_info(int32_t row, halfstep_format_info *info);
HALFSTEP_API int32_t halfstep_format_find(const char *name);
/* Describes hyper-parameter `index` (0 .. hypers - 1) of the rule in row `rule`. Those common to all rules come
 * first. */
HALFSTEP_API int halfstep_get_hyper_info(int32_t rule, int32_t index, halfstep_hyper_info *info);
/* Returns the values of a choice by position, or NULL past the last. The first is the default, except for "decay",
 * where each rule has its own. Choices: "decay", "schedule", "decay_schedule", "scan", "generator", "clip", "missing",
 * and the hyper-parameters of rules whose values have names, such as "ns_form". The number of such a value is its
 * position. */
HALFSTEP_API const char *halfstep_choice_value(const char *choice, int32_t index);

/* Writes the full form of a recipe, with every part spelled out, into text[size]. 64 bytes are enough for any. Errors:
 * NAME (which part), UNSUPPORTED (a format that cannot serve the role, or a wrong number of state formats), RANGE (text
 * is too small). */
HALFSTEP_API int halfstep_recipe_full(const char *recipe, char *text, size_t size);
/* Writes what a recipe is known to cost into text[size], as a sentence without its full stop: a format that is too
 * coarse for a state of its rule. Writes "" if nothing is known. 256 bytes are enough for any. Errors as above. */
HALFSTEP_API int halfstep_recipe_caveat(const char *recipe, char *text, size_t size);

/* What tensors take, before any optimizer exists. Numbers are bytes unless they say otherwise. */
typedef struct halfstep_forecast {
    uint32_t struct_size;       /* set by the caller: sizeof(halfstep_forecast) */
    int32_t without_weights;    /* set by the caller. 1: storage keeps no weights */
    uint64_t piece_bytes;       /* set by the caller: states of a tensor that need more are cut in storage; 0: 16 MiB */
    uint64_t tensors, elements; /* their numbers */
    uint64_t weights, gradients, weight_extras, states; /* as halfstep_memory() counts them before the states exist */
    uint64_t workspace;         /* for matrices on the processor, which halfstep_memory() then counts with the states */
    uint64_t largest_gradient;  /* of one tensor */
    uint64_t largest_states;    /* of one tensor, with the extra plane of its weight */
    /* With states in storage, such as a file (halfstep_store_create()): */
    uint64_t pieces;            /* their number */
    uint64_t stored;            /* all pieces, each in whole pages of 4096 bytes. A file has them twice, with its header
                                   and records */
    uint64_t largest_piece;     /* in pages, too */
    uint64_t memory;            /* of pieces on their way, if no more is allowed: in place of states and extras */
    uint64_t read, written;     /* in each step with all gradients, as if no piece stayed in memory */
} halfstep_forecast;

/* Adds `count` equal tensors under a recipe to a forecast, which begins as zeros beside what the caller sets. Its
 * tensors may differ in everything. The tensor is described as for halfstep_add_tensor(), which would refuse the same.
 * Its group, name and id do not count. Assumes the rule's default hyper-parameters (sgd without momentum). Errors: as
 * for that function and for the recipe; RANGE for a count below 1, 2^31 tensors or 2^57 elements. */
HALFSTEP_API int halfstep_forecast_tensors(halfstep_forecast *forecast, const char *recipe,
                                           const halfstep_tensor *tensor, int32_t count);
/* Gives three numbers of the forecast of one tensor, which may be empty: weights, weight_extras and states. Any out
 * pointer may be NULL. */
HALFSTEP_API int halfstep_recipe_bytes(const char *recipe, int32_t ndim, int64_t rows, int64_t row_length,
                                       uint64_t *weight, uint64_t *weight_extra, uint64_t *states);

/* ---- Threads and instruction sets -----------------------------------------------------------------------------------
 * */

/* Returns the number of threads that "threads = 0" means now: HALFSTEP_THREADS, else OMP_NUM_THREADS, else the number
 * of processors this process may use, at most the quota of its container. A variable that is 0 or malformed counts as
 * not set.
 *
 * If the processors belong to several NUMA nodes (Linux), each of the library's own threads stays on one node. The
 * threads are placed in the order of their shares of a step. halfstep_allocate_states() then has each thread touch its
 * share's states first. HALFSTEP_PIN=0 leaves threads alone. HALFSTEP_PIN=1 pins them also if there is only one node.
 * The caller's thread is never moved. */
HALFSTEP_API int32_t halfstep_default_threads(void);
/* Sets options.threads from the next step on. Errors: RANGE. */
HALFSTEP_API int halfstep_set_threads(halfstep_optimizer *optimizer, int32_t threads);

/* Returns the name of the instruction set in use: the best that this build and this processor have, or the one that the
 * environment variable HALFSTEP_ISA names. All give the same bits. */
HALFSTEP_API const char *halfstep_isa(void);

/* ---- Devices ----------------------------------------------------------------------------------------------------- */

/* A handle on a device ("cuda") differs from one on the processor:
 *   memory    Weights, gradients, states and what halfstep_accumulate() adds are memory of that device, the caller's or
 *             from halfstep_device_allocate(). Any other memory is refused (ARGUMENT), with nothing changed. Values of
 *             halfstep_read_slot() and halfstep_write_slot() are memory of the process. Statistics may be either; if
 *             they are memory of the process, the call waits.
 *   steps     Steps are submitted to the stream in the order of the calls. When a call returns, it has read its arrays
 *             of pointers, but the gradients must stay until the stream has run the step. Steps return HALFSTEP_OK
 *             where the processor would return HALFSTEP_NONFINITE; halfstep_synchronize() returns it later.
 *   reading   Reading counters, scalars, slots, steps of groups, the lr, the norm or skipped steps waits for the
 *             stream. The copies of halfstep_bind_record() are written only then.
 *   capture   While the stream is captured into a CUDA graph, steps are recorded. Counters, schedules and random bits
 *             advance at each replay. Call halfstep_synchronize() before the capture begins. Until it ends, every call
 *             that waits, allocates or sends a change is refused (ORDER). A second step in one capture must have the
 *             pointers of the first. Hyper-parameters that are set afterwards reach the replays that follow.
 *   threads   As on the processor. Any thread may call, with any context current.
 *   fork      The child can only destroy such a handle.
 *   check     Before a GPU steps anything of the caller's, it steps small cases of the library's, whose bits must be
 *             those of the processor (DEVICE otherwise). This happens once for each GPU, driver and library;
 *             docs/gpu.md says where it is remembered. HALFSTEP_DEVICE_CHECK=always checks in every process, =never
 *             does not. */

/* Waits for everything that was submitted. Returns HALFSTEP_NONFINITE, with the text of the last one, if a step or
 * round was refused since the last call. Returns DEVICE if the device failed. On the processor it always returns
 * HALFSTEP_OK, because steps have already reported everything. */
HALFSTEP_API int halfstep_synchronize(halfstep_optimizer *optimizer);
/* Sets another stream of the same device for all later work. The new stream waits for what was submitted before, unless
 * it is being captured. Errors: ARGUMENT on the processor unless stream is NULL, DEVICE. */
HALFSTEP_API int halfstep_set_stream(halfstep_optimizer *optimizer, void *stream);

typedef struct halfstep_device_info {
    uint32_t struct_size;    /* set by the caller: sizeof(halfstep_device_info) */
    int32_t devices;         /* number that the driver shows */
    int32_t driver;          /* newest CUDA version of the driver, 1000 * major + 10 * minor; 0: no driver */
    int32_t minimum_driver;  /* lowest value of `driver` that the library accepts */
    int32_t images;          /* images of device code in this build, one for each architecture, and PTX; 0: none */
    int32_t compute;         /* compute capability, 10 * major + minor */
    int32_t multiprocessors;
    int32_t usable;          /* 1: halfstep_create() accepts it */
    uint64_t memory;         /* bytes */
    const char *name;        /* static text; "" if there is no device */
    const char *code;        /* static text: the compute capabilities that the build has machine code for, and PTX, from
                                which a driver makes code for any other: "12.0 10.0 9.0 8.0 PTX". The name of the
                                variable HALFSTEP_CUDA_IMAGE if it names a file */
} halfstep_device_info;

/* Describes a device of halfstep_options, as far as possible, usable or not. If it is not usable,
 * halfstep_error_detail(NULL) says why. Errors: ARGUMENT; NAME for the processor or an unknown device. */
HALFSTEP_API int halfstep_get_device_info(const char *device, halfstep_device_info *info);

/* Returns a static text of one line: for which GPUs this build has device code. Looks for no driver and no GPU. */
HALFSTEP_API const char *halfstep_device_code(void);

#ifdef __cplusplus
}
#endif
#endif

/* ---- What few programs need -------------------------------------------------------------------------------------- */

/* Define HALFSTEP_ADVANCED before this header is included to get what follows: for communicators, bindings, memory of
 * devices and testers. */
#if defined(HALFSTEP_ADVANCED) && !defined(HALFSTEP_H_ADVANCED)
#define HALFSTEP_H_ADVANCED

#ifdef __cplusplus
extern "C" {
#endif

/* Make a call in parts, so that ranks that hold parts of the tensors can agree. halfstep_run_begin() reads the
 * gradients and writes halfstep_statistics_count() integers to call->statistics. The caller may add those of all ranks,
 * element by element (MPI_SUM, all_reduce). halfstep_run_finish() then makes the call by these statistics. Shards that
 * together cover every element once give the bits of one process. All three functions take the same call; begin does
 * not read its weights.
 *
 * Rules that are two_pass need a third call between them, halfstep_run_norms(). It takes the statistics that the ranks
 * have added up after begin, and fills those from halfstep_norms_offset() on. These are then added over the ranks in
 * the same way. It does nothing for other rules, in micro-steps and at the end of a round. Without it, finish makes the
 * sums itself, which needs whole tensors here (ORDER otherwise).
 *
 * Statistics of TENSOR are added over the ranks that share the tensor. Those of ROUND are added over all ranks among
 * which the tensors are divided (not over replicas), whether or not they share tensors. finish takes the norm from
 * them. Micro-steps of parts of tensors are UNSUPPORTED if the scale of a state is a sum over the tensor.
 *
 * A rule with totals keeps one set of scalars for all tensors whose groups have the same hyper-parameter "d_group". A
 * total has as many integers as the statistics of ROUND. If several handles have such tensors, the caller adds up the
 * integers of the first totals of each tensor. The count of TENSOR says where the next tensor's are. The caller gives
 * the sum to one tensor of each handle, with a gradient or without, and 0 to the others. All handles make every step
 * and start from equal scalars: set those of the handle whose first scalar is largest.
 *
 * A process that holds no tensor calls halfstep_allocate_states() all the same, and makes all calls of the others.
 *
 * halfstep_statistics_count() and halfstep_norms_offset() read only kind and tensor, and return 0 for an invalid call.
 * The count of ROUND is the same for every handle, NULL included. */
HALFSTEP_API int halfstep_run_begin(halfstep_optimizer *optimizer, const halfstep_call *call);
HALFSTEP_API int halfstep_run_norms(halfstep_optimizer *optimizer, const halfstep_call *call);
HALFSTEP_API int halfstep_run_finish(halfstep_optimizer *optimizer, const halfstep_call *call);
HALFSTEP_API int64_t halfstep_statistics_count(const halfstep_optimizer *optimizer, const halfstep_call *call);
HALFSTEP_API int64_t halfstep_norms_offset(const halfstep_optimizer *optimizer, const halfstep_call *call);

/* Binds the memory of one slot, for hosts that keep each state as an object of their own. extra may be NULL if
 * extra_bytes is 0. The bytes are taken as they are, on the slot's present grid. All zero is the initial value of every
 * state. A slot may be bound again at any time between steps. Steps are allowed once every slot that stores something
 * is bound. An optimizer that stores nothing at all (sgd in f32) still needs halfstep_allocate_states(). Bytes that
 * decode to infinities or NaN are memory-safe and spoil only the numbers. An average (ema) may follow a live weight
 * with residuals or error codes. Bind those as extra of its gradient slot, with code NULL; they are only read. */
HALFSTEP_API int halfstep_bind_slot(halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, void *code,
                                    void *extra);

/* States in storage: a file, or whatever else lies behind a table of functions, in place of memory. A step brings them
 * into memory piece by piece, works on them, and writes them back. A piece is one range of bytes: the states of a
 * tensor, or of some rows of a large one. Its planes follow one another, each on 64 bytes: the extra plane of the
 * weight, then codes and extra plane of each state, in the order of the slots. The codes of the weight come last.
 * Every tensor has at least one piece. Pieces of 0 bytes are neither read nor written. */
typedef struct halfstep_piece {
    uint32_t struct_size;         /* sizeof(halfstep_piece) */
    int32_t tensor;
    int64_t first_row, n_rows;    /* rows of the part held here */
    uint64_t state_bytes;         /* of the planes with their padding: where the weight begins */
    uint64_t weight_bytes;        /* 0 if the storage takes no weights */
    /* Where the planes of each slot lie. 0 bytes: nothing is stored. The codes of WEIGHT are at state_bytes. */
    struct {
        uint64_t code_offset, code_bytes, extra_offset, extra_bytes;
    } slot[2 + HALFSTEP_MAX_STATES];
} halfstep_piece;

/* The table of a storage. Each function returns 0 or an error code below 0. One thread at a time calls them, and not
 * necessarily always the same one. They must not call functions on the handle, except that flush may call those that
 * read its records. */
typedef struct halfstep_storage {
    uint32_t struct_size;         /* sizeof(halfstep_storage) */
    int32_t weights;              /* 1: pieces end with the codes of the weight */
    void *host;                   /* first argument of the functions */
    /* States of a tensor that need more than piece_bytes are cut by rows; 0: 16 MiB. Not cut are tensors that are
     * stepped as matrices, tensors with states that are vectors or have one scale, and tensors of one row. */
    uint64_t piece_bytes;
    /* Bytes of memory for pieces. 0: the least, which is three times the larger of piece_bytes and the largest piece,
     * or everything if that is less. Pieces that fit beside this stay in memory. They are then only written. */
    uint64_t memory;
    /* Begin to read or write the first `bytes` bytes of a piece. The memory is aligned to 4096 bytes, has room for the
     * next multiple of 4096, and stays as it is until wait(). A read gives what was last written, current or not. Only
     * micro-steps and functions that read or write slots read the weight. Writes always bring the whole piece. */
    int (*read)(void *host, int64_t piece, void *memory, uint64_t bytes);
    int (*write)(void *host, int64_t piece, const void *memory, uint64_t bytes);
    /* Waits for all that was begun. Afterwards none of it is under way, not even after an error. */
    int (*wait)(void *host);
    /* Makes all that was written since the last flush current, in one. Records have their new numbers already. weights
     * are those of the call; NULL in micro-steps, and where the caller gave none. */
    int (*flush)(void *host, void *const *weights);
    const char *(*why)(void *host); /* returns the text of the last error; may be NULL */
    int (*begin)(void *host);       /* called before a step, a round or a flush. An error refuses that call, and the
                                       storage counts as whole. May be NULL */
} halfstep_storage;

/* Binds the states to a storage, in place of halfstep_bind_states(). The storage must hold a value for every piece by
 * the first step: from before, or by halfstep_write_initial(). The table is copied. host must stay until the handle is
 * destroyed or bound anew. storage = NULL ends the binding; the states then have no memory.
 *
 * Steps go from the last piece to the first, with three buffers. While one piece is worked on, the next is read and the
 * one before is written. Pieces of small tensors that follow one another are taken together. Tensors without a gradient
 * and refused steps write nothing. Sums over a tensor that is cut read its pieces twice. Rules with totals read all
 * pieces twice. flush is called at the end of every STEP that counts something, and of a ROUND, whose call may have
 * weights. Calls about single tensors wait for one another. The bits are those of states in memory.
 *
 * If a function of the table fails, the call fails with its code and text. Counters do not advance, but weights may
 * have been stepped in part. Every further call that needs the states is refused (ORDER) until the handle is bound
 * anew. The caller then reads the weights back, and restores the records as they were at the last flush: a STEP that
 * fails leaves them so, a round does not.
 *
 * Errors: UNSUPPORTED on a device; RANGE if memory is too small. */
HALFSTEP_API int halfstep_bind_storage(halfstep_optimizer *optimizer, const halfstep_storage *storage);
/* Returns the number of pieces of the bound storage, or those that a storage of default options would have. */
HALFSTEP_API int64_t halfstep_piece_count(const halfstep_optimizer *optimizer);
/* Describes a piece of these. Errors: ARGUMENT. */
HALFSTEP_API int halfstep_get_piece(const halfstep_optimizer *optimizer, int64_t piece, halfstep_piece *info);
/* Writes the initial value of every piece, and flushes. weights may be NULL if the storage takes none. */
HALFSTEP_API int halfstep_write_initial(halfstep_optimizer *optimizer, void *const *weights);
/* Read or write some bytes of a plane of a state or a weight, wherever they are. extra: 0 codes, 1 the extra plane.
 * The codes of a weight are those that the storage holds. Bytes are taken as they are. What is written, also by
 * halfstep_write_slot(), becomes current with the next flush. Errors: RANGE for bytes beyond the plane, ARGUMENT for
 * codes of a gradient, or of a weight that is not in a storage. */
HALFSTEP_API int halfstep_read_bytes(const halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, int32_t extra,
                                     uint64_t first, uint64_t bytes, void *out);
HALFSTEP_API int halfstep_write_bytes(halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, int32_t extra,
                                      uint64_t first, uint64_t bytes, const void *in);
/* Flushes the storage. weights may be NULL. Does nothing if none is bound. */
HALFSTEP_API int halfstep_flush(halfstep_optimizer *optimizer, void *const *weights);

/* Holds the addresses at which a host keeps copies of a tensor's record. NULL: no copy. */
typedef struct halfstep_record_places {
    uint32_t struct_size;                       /* sizeof(halfstep_record_places) */
    int32_t reserved;                           /* 0 */
    float *step;                                /* of state_steps, as a float */
    int64_t *state_steps, *full_steps, *writes;
    double *scalar[HALFSTEP_MAX_SCALARS];
    double *grid[HALFSTEP_MAX_STATES];
} halfstep_record_places;

/* Keeps copies of a tensor's record up to date. They are written now and whenever a number changes, for hosts that show
 * them or save states at any time. The library never reads them. The places replace those of an earlier call and must
 * live as long as the handle. places = NULL ends the copying. Errors: ARGUMENT for a scalar or a grid that the tensor
 * does not have. */
HALFSTEP_API int halfstep_bind_record(halfstep_optimizer *optimizer, int32_t tensor,
                                      const halfstep_record_places *places);
/* Binds "lr" of a group or of all, or "gradient_scale" (group = HALFSTEP_ALL_GROUPS), to *place. Each step reads the
 * value there when it runs. place is in the memory of the device, and earlier work on the stream may write it. On the
 * processor it is read when a step is called, so no two threads may step at once. The caller keeps the value within its
 * bounds. Only gradient_scale may be not finite: such a step is refused without a wait, as a loss scaler wants it.
 * NULL: the value that was set counts again. No group can be added while an lr is bound. Errors: NAME for other
 * hyper-parameters, ORDER if there is no group, ARGUMENT for memory that is not the device's. */
HALFSTEP_API int halfstep_bind_hyper(halfstep_optimizer *optimizer, int32_t group, const char *name,
                                     const double *place);
/* Allocate, release and copy memory of the handle's device. Memory is aligned to 64 bytes and must be released before
 * the handle is destroyed. Releasing NULL does nothing. The copy goes between the device and the process, in either
 * direction, or within the device. It runs in the order of the calls and is done when the function returns. Errors:
 * MEMORY, DEVICE. */
HALFSTEP_API int halfstep_device_allocate(const halfstep_optimizer *optimizer, uint64_t bytes, void **memory);
HALFSTEP_API void halfstep_device_release(const halfstep_optimizer *optimizer, void *memory);
HALFSTEP_API int halfstep_device_copy(const halfstep_optimizer *optimizer, void *to, const void *from, uint64_t bytes);
/* Returns HALFSTEP_ABI of the loaded library. */
HALFSTEP_API int32_t halfstep_abi(void);

/* Computes the factor of a schedule at a step, counted from 0, without an optimizer, and writes it to *factor. name is
 * a value of the choice "schedule". Errors: NAME; RANGE, also for a schedule that falls with total_steps of 0 or less
 * than warmup_steps. */
HALFSTEP_API int halfstep_schedule_factor(const char *name, uint64_t step, double warmup_steps, double total_steps,
                                          double final_fraction, double decay_start, double power, double *factor);

/* Returns the id that a tensor of this name gets if its own is 0: a hash of the name. Returns 0 for NULL. */
HALFSTEP_API uint64_t halfstep_name_id(const char *name);

/* List the instruction sets that the library knows, in ascending order of preference. _available returns 1 if this
 * build and this processor have it. */
HALFSTEP_API int32_t halfstep_isa_count(void);
HALFSTEP_API const char *halfstep_isa_name(int32_t index);
HALFSTEP_API int32_t halfstep_isa_available(int32_t index);
/* Chooses the instruction set of optimizers created afterwards. NULL returns to the default. Errors: NAME; UNSUPPORTED
 * if this processor or this build does not have it. */
HALFSTEP_API int halfstep_set_isa(const char *name);
/* Returns a sentence if HALFSTEP_ISA names an instruction set that is unknown or cannot run here, which
 * halfstep_create() refuses. Otherwise returns NULL. The text is valid until the thread's next call. */
HALFSTEP_API const char *halfstep_isa_warning(void);
/* Writes the features of the processor that matter here into text[size], separated by spaces. */
HALFSTEP_API void halfstep_cpu_features(char *text, size_t size);

/* Writes n raw 32-bit words of a generator ("lattice", "mixer", "philox7") to out, for statistical testers. They begin
 * at pair `first` of the strand (seed, id, write, slot). "lattice" gives the words of element formats. `write` then
 * counts the writes of the slot itself (below 2^63), and words of one element are related within 256 of them. Errors:
 * NAME. */
HALFSTEP_API int halfstep_random_words(const char *generator, uint64_t seed, uint64_t id, uint64_t write, int32_t slot,
                                       uint64_t first, uint32_t *out, size_t n);
/* Rounds n floats to BF16 by the library's stochastic rule, with the given words. One word serves elements 2k and
 * 2k+1. */
HALFSTEP_API int halfstep_bf16_stochastic(const float *in, uint16_t *out, size_t n, const uint32_t *words);

#ifdef __cplusplus
}
#endif
#endif
