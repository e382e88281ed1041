/* halfstep.h - optimizer steps on weights and states stored in 32, 16, 8 or 4 bits and computed in fp32.
 *
 * This header is the manual. It includes nothing but <stddef.h> and <stdint.h>, compiles alone as C11 and C++, and uses
 * only fixed-width integers, float, double and pointers, so that a binding can mirror it line by line.
 *
 *   halfstep_optimizer *opt;
 *   int32_t group, tensor;
 *   halfstep_create(NULL, &opt);
 *   halfstep_add_group(opt, "adamw/bf16-sr/int8", &group);
 *   halfstep_set_hyper(opt, group, "lr", 3e-4);
 *   halfstep_tensor t = {sizeof t};
 *   t.group = group; t.name = "layer.weight"; t.ndim = 2; t.rows = 1024; t.row_length = 4096; t.gradient = "bf16";
 *   halfstep_add_tensor(opt, &t, &tensor);
 *   halfstep_allocate_states(opt);
 *   for (;;) { ...gradients...; halfstep_step(opt, weights, gradients); }
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
 * library does not know of it is zero, else ARGUMENT.
 *
 * BITS. The same inputs, seed and counters give the same bits in weights and states on every instruction set, compiler,
 * thread count and shard layout. docs/numerics.md states the contract.
 *
 * THREADS. Different handles may be used at the same time, and halfstep_step_tensor(),
 * halfstep_accumulate_states_tensor() and the functions they are in parts on different tensors of one handle.
 * Everything else on one handle is the caller's to serialise. After fork() the child may go on with its copy. The
 * caller's floating-point mode (rounding, flushing of subnormals) neither matters nor changes.
 *
 * DEVICES. A handle computes on the processor, or on a device (options.device): then its states, weights and gradients
 * are memory of that device, a step is submitted to a stream and not waited for, and what it came to is known when
 * somebody asks. See "Devices" below; docs/gpu.md tells how.
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
#define HALFSTEP_ABI 1

/* Version as major * 10000 + minor * 100 + patch, and the ABI number, of the library that is loaded. */
HALFSTEP_API int32_t halfstep_version(void);
HALFSTEP_API int32_t halfstep_abi(void);

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
                                          norm not finite, so the step was refused and not one bit changed; see
                                          halfstep_skipped_steps() */

/* Static text for a code; never NULL. */
HALFSTEP_API const char *halfstep_strerror(int code);

/* ---- What there is: rules, formats, choices ---------------------------------------------------------------------- */

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

#define HALFSTEP_MAX_STATES 6

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
    int32_t scalars;        /* doubles that it keeps for each tensor, by name: see halfstep_get_scalar() */
    int32_t two_pass;       /* 1: sums over each whole tensor come before its update (halfstep_step_norms) */
    const char *scalar_name[4];
    int32_t matrix;         /* 1: tensors of two or more dimensions are stepped as matrices and cannot be sharded */
    int32_t raw_gradient;   /* 1: the gradient slot holds a weight, in any weight format (ema) */
    int32_t accumulates;    /* 1: micro-steps keep the gradient in a state (halfstep_accumulate_states) */
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
    int32_t grid;           /* 1: second moments are stored on a grid that decays with them: halfstep_get_scalar() */
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
/* Hyper-parameter `index` (0 .. hypers - 1) of the rule in row `rule`; those common to all rules come first. */
HALFSTEP_API int halfstep_get_hyper_info(int32_t rule, int32_t index, halfstep_hyper_info *info);
/* The values a choice can take, or NULL past the last; the first is the default (for "decay", the rule's own is).
 * Choices: "decay", "schedule", "scan", "generator", "clip", "missing". */
HALFSTEP_API const char *halfstep_choice_value(const char *choice, int32_t index);

/* The full form of a recipe, every part spelled out, into text[size] (64 bytes are enough for any).
 * Errors: NAME (which part), UNSUPPORTED (a format that cannot serve the role; a wrong number of state formats). */
HALFSTEP_API int halfstep_recipe_full(const char *recipe, char *text, size_t size);

/* Bytes that one tensor takes under a recipe, before anything exists, with the rule's default hyper-parameters (sgd
 * without momentum). All out pointers may be NULL. */
HALFSTEP_API int halfstep_recipe_bytes(const char *recipe, int32_t ndim, int64_t rows, int64_t row_length,
                                       uint64_t *weight, uint64_t *weight_extra, uint64_t *states);

/* ---- Instruction sets and threads -------------------------------------------------------------------------------- */

/* All instruction sets that the library knows, in ascending order of preference; available = 1 where this build and
 * this processor have it. */
HALFSTEP_API int32_t halfstep_isa_count(void);
HALFSTEP_API const char *halfstep_isa_name(int32_t index);
HALFSTEP_API int32_t halfstep_isa_available(int32_t index);
/* The one in use: the best available, the environment's HALFSTEP_ISA, or what halfstep_set_isa() chose for optimizers
 * created afterwards (NULL: back to the default). Any choice gives the same bits. */
HALFSTEP_API const char *halfstep_isa(void);
HALFSTEP_API int halfstep_set_isa(const char *name);
/* One line if HALFSTEP_ISA is set to what is unknown or cannot run here, and so not followed; else NULL. Static
 * text. */
HALFSTEP_API const char *halfstep_isa_warning(void);
/* Features of the processor that matter here, separated by spaces. */
HALFSTEP_API void halfstep_cpu_features(char *text, size_t size);
/* What "threads = 0" means now: HALFSTEP_THREADS, else OMP_NUM_THREADS, else the processors this process may use. On
 * Linux, where these belong to several NUMA nodes, the library's own threads are each kept on one node, in the order of
 * their shares of a step, and halfstep_allocate_states() has each share's states touched first by its thread.
 * HALFSTEP_PIN=0 leaves threads alone, HALFSTEP_PIN=1 keeps them on their node also where there is one. The caller's
 * thread is never moved. */
HALFSTEP_API int32_t halfstep_default_threads(void);

/* ---- Optimizers -------------------------------------------------------------------------------------------------- */

typedef struct halfstep_optimizer halfstep_optimizer;

/* A host that has its own threads may lend them: run(host, task, argument, n) must call task(argument, i) once for
 * every i in 0 .. n - 1, in any order, on any threads, also one after another, and return when all are done. It must
 * not begin another call on the same handle on a thread that it borrows while it waits. */
typedef void (*halfstep_task)(void *argument, int64_t index);
typedef void (*halfstep_run_tasks)(void *host, halfstep_task task, void *argument, int64_t n);

typedef struct halfstep_options {
    uint32_t struct_size;      /* sizeof(halfstep_options); zero bytes after it, or none, mean the defaults */
    int32_t threads;           /* 0: halfstep_default_threads() at each step; else 1 .. 1024 */
    uint64_t seed;             /* of the random bits */
    halfstep_run_tasks run;    /* NULL: the library's own pool */
    void *host;                /* first argument of run */
    const char *device;        /* NULL or "cpu"; "cuda": the first GPU; "cuda:N": number N, from 0 */
    void *stream;              /* of the device, a CUstream (cudaStream_t); NULL: its default stream */
} halfstep_options;

/* options may be NULL. *optimizer is NULL after an error. Errors: NAME for a device that is unknown, ARGUMENT for a
 * stream without a device, RANGE, MEMORY; DEVICE where the device cannot be used: halfstep_error_detail(NULL) then has
 * the sentence. */
HALFSTEP_API int halfstep_create(const halfstep_options *options, halfstep_optimizer **optimizer);
/* Changes options.threads from the next step on. Errors: RANGE. */
HALFSTEP_API int halfstep_set_threads(halfstep_optimizer *optimizer, int32_t threads);
/* Frees everything the library allocated for it; NULL is fine. */
HALFSTEP_API void halfstep_destroy(halfstep_optimizer *optimizer);
/* A sentence about the last error or refused step on this handle, "" if there was none: that of the calling thread's
 * own last error, where its last error was on this handle, else of any thread's. NULL: of the thread's last error, if
 * that was of halfstep_create() or halfstep_get_device_info(). Valid until the thread's next call. */
HALFSTEP_API const char *halfstep_error_detail(const halfstep_optimizer *optimizer);

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
 *             so do copies of halfstep_bind_step() and halfstep_bind_grid(), which are written then.
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
/* Another stream of the same device, for all that is asked for from now on; it is made to wait for what was asked for
 * before, unless it is being captured. Errors: ARGUMENT on the processor unless NULL, DEVICE. */
HALFSTEP_API int halfstep_set_stream(halfstep_optimizer *optimizer, void *stream);
/* "lr" of a group, or of all, and "gradient_scale" (group = HALFSTEP_ALL_GROUPS) are read from *place when a step runs:
 * a double in the memory of the device, which work before it on the stream may write. On the processor when a step is
 * called, and then no two threads may step at once. The caller keeps it within the bounds, but for a gradient_scale
 * that is not finite: such a step is refused, as a loss scaler wants it, without a wait. NULL: as set. Errors: NAME
 * for other hyper-parameters, ARGUMENT for memory that is not the device's. */
HALFSTEP_API int halfstep_bind_hyper(halfstep_optimizer *optimizer, int32_t group, const char *name,
                                     const double *place);
/* Memory of the handle's device, aligned to 64 bytes, to be released before the handle is destroyed (NULL is fine), and
 * a copy between it and the process's, in either direction, or within it, in the order of the calls, done when it
 * returns. Errors: MEMORY, DEVICE. */
HALFSTEP_API int halfstep_device_allocate(const halfstep_optimizer *optimizer, uint64_t bytes, void **memory);
HALFSTEP_API void halfstep_device_release(const halfstep_optimizer *optimizer, void *memory);
HALFSTEP_API int halfstep_device_copy(const halfstep_optimizer *optimizer, void *to, const void *from, uint64_t bytes);

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

/* As much as can be told of a device of halfstep_options, whether or not it can be used; where it cannot,
 * halfstep_error_detail(NULL) says why. Errors: ARGUMENT; NAME for what is no device, or the processor. */
HALFSTEP_API int halfstep_get_device_info(const char *device, halfstep_device_info *info);

/* ---- Groups and hyper-parameters --------------------------------------------------------------------------------- */

#define HALFSTEP_ALL_GROUPS (-1)

/* A group is a recipe with its hyper-parameters. Its index goes to *group. */
HALFSTEP_API int halfstep_add_group(halfstep_optimizer *optimizer, const char *recipe, int32_t *group);
HALFSTEP_API int32_t halfstep_group_count(const halfstep_optimizer *optimizer);
/* The full form of a group's recipe, as halfstep_recipe_full() writes it (64 bytes are enough for any). */
HALFSTEP_API int halfstep_get_group_recipe(const halfstep_optimizer *optimizer, int32_t group, char *text, size_t size);
/* Hyper-parameters are doubles, set by name, checked against their bounds, and read at each step. NaN is out of bounds.
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
/* Choices are names. Per group:
 *   decay      "l2": g += weight_decay * w; "decoupled": w -= lr * weight_decay * w (Loshchilov & Hutter 2019);
 *              "fully-decoupled": as "reference_lr" above; "proximal": w = (w - lr * update) / (1 + lr * weight_decay)
 *              (Xie et al. 2022)
 *   schedule   a factor on lr, by the group's count of accepted steps: "constant", "linear", "cosine", "wsd",
 *              "inverse-power" (the schedule of the adamw_bfloat16 package)
 * Per optimizer (group = HALFSTEP_ALL_GROUPS):
 *   scan       "scan": gradients are read once more before anything is written, and a step with a non-finite one is
 *              refused whole; "per-tensor": tensors are judged one by one, the others are stepped and the call returns
 *              HALFSTEP_NONFINITE all the same; "known-finite": the caller vouches
 *   clip       for halfstep_step_tensor(): "delayed": the norm of the round before, and each tensor's own until a round
 *              has had one; "per-tensor": each tensor's own
 *   generator  "lattice", "mixer" or "philox7": the source of random bits (docs/random.md)
 *   missing    "skip": a step leaves tensors alone whose gradient is NULL; "error": it refuses to be made
 * A step is refused, too, if the effective gradient g has |g| >= 2^62: its square would leave fp32. */
HALFSTEP_API int halfstep_set_choice(halfstep_optimizer *optimizer, int32_t group, const char *choice,
                                     const char *value);
HALFSTEP_API const char *halfstep_get_choice(const halfstep_optimizer *optimizer, int32_t group, const char *choice);
/* The lr that the group's next step will use: "lr" times the schedule's factor. */
HALFSTEP_API int halfstep_current_lr(const halfstep_optimizer *optimizer, int32_t group, double *lr);

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

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

/* Errors: SHAPE (names the tensor, and the cut that is not on a block boundary), DUPLICATE, NAME, ORDER. A part of zero
 * elements is fine. */
HALFSTEP_API int halfstep_add_tensor(halfstep_optimizer *optimizer, const halfstep_tensor *tensor, int32_t *index);
HALFSTEP_API int32_t halfstep_tensor_count(const halfstep_optimizer *optimizer);
/* A tensor as it was added, with the id and the part that zeros stood for; name lives as long as the handle. The caller
 * sets tensor->struct_size. */
HALFSTEP_API int halfstep_get_tensor(const halfstep_optimizer *optimizer, int32_t index, halfstep_tensor *tensor);
/* The hash that id 0 stands for; 0 for NULL. */
HALFSTEP_API uint64_t halfstep_name_id(const char *name);
/* Row by name, or -1. */
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
    int32_t grid;              /* 1: stored on a grid, the scalar NAME.grid of the tensor: halfstep_get_scalar() */
    void *code, *extra;        /* where it is bound, NULL for weights' and gradients' own bytes */
    int64_t rows, columns;     /* of what it stores of the part held here: a vector over rows is rows x 1, one over
                                  columns 1 x columns, and halfstep_read_slot() and halfstep_write_slot() take it so */
    int32_t precise;           /* 1: in the format of halfstep_rule_info.precise_format, not in the recipe's */
    int32_t reserved;
} halfstep_slot_info;

HALFSTEP_API int halfstep_get_slot_info(const halfstep_optimizer *optimizer, int32_t tensor, int32_t slot,
                                        halfstep_slot_info *info);

/* Bytes that halfstep_bind_states() wants for everything that is stored beside weights and gradients: states, their
 * scales, residuals and error codes. Every stream starts on 64 bytes. */
HALFSTEP_API int halfstep_state_bytes(halfstep_optimizer *optimizer, uint64_t *bytes);
/* Gives the states their memory (64-byte aligned, at least that many bytes, the caller's until the handle is destroyed)
 * and sets them to their initial values. No tensor or group can be added afterwards. */
HALFSTEP_API int halfstep_bind_states(halfstep_optimizer *optimizer, void *memory, uint64_t bytes);
/* The same with the library's memory: huge pages where large, slots staggered. */
HALFSTEP_API int halfstep_allocate_states(halfstep_optimizer *optimizer);
/* The same slot by slot, for hosts that keep each state as an object of their own; extra may be NULL if extra_bytes is
 * 0. The bytes are taken as they are (all zero is the initial value of every format), on the grid that the slot has.
 * Rebinding is allowed at any time between steps. Once every slot that stores something is bound, steps may be made; an
 * optimizer that stores nothing at all (sgd in f32) still needs halfstep_allocate_states(). Bytes that decode to
 * infinities or NaN harm nothing but the numbers. The residuals or error codes of a live weight that an average follows
 * (ema) are bound as extra of its gradient slot, with code NULL; they are read only. */
HALFSTEP_API int halfstep_bind_slot(halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, void *code,
                                    void *extra);

/* Decode, and encode, rows first_row .. first_row + n_rows - 1 of the part held here (counted from its first row) as
 * fp32, n_rows x n_columns of them. `data` is the caller's weight or gradient buffer for those slots and NULL for
 * states. Writes round to nearest (ties away from zero where the format is stochastic), consume no random bits, and
 * saturate; a weight with a residual or error code gets both parts; a second moment with a grid is stored on the one
 * that stands. RANGE: a value that is not finite for a block format, and for a second moment one that is negative or
 * not finite; its -0 is stored as +0. */
HALFSTEP_API int halfstep_read_slot(const halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, const void *data,
                                    int64_t first_row, int64_t n_rows, float *out);
HALFSTEP_API int halfstep_write_slot(halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, void *data,
                                     int64_t first_row, int64_t n_rows, const float *in);
/* The weights to evaluate, decoded like halfstep_read_slot() of the weight: schedulefree's average x, for other rules
 * the weights themselves. */
HALFSTEP_API int halfstep_read_average(const halfstep_optimizer *optimizer, int32_t tensor, const void *weight,
                                       int64_t first_row, int64_t n_rows, float *out);

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

/* One update of every tensor: weights[i] and gradients[i] belong to tensor i and are read anew at each call. A NULL
 * gradient leaves that tensor alone, weights, states and counters, though the call counts as a step of every schedule;
 * for a part of no elements pass any other address, so that its counters keep pace with those of the other shards. NULL
 * weights with a gradient and n > 0 are an error. Gradients are never written. Returns HALFSTEP_NONFINITE, with nothing
 * changed, if a gradient is not finite. UNSUPPORTED for a part of a tensor, unless nothing has to be known of the rest
 * of it: scan "known-finite", no clipping, a rule of one pass. */
HALFSTEP_API int halfstep_step(halfstep_optimizer *optimizer, void *const *weights, const void *const *gradients);

/* The same in two halves, so that ranks that hold parts of the tensors can agree. begin reads the gradients and writes
 * halfstep_statistics_count() integers; the caller may add those of all ranks, element by element (MPI_SUM,
 * all_reduce); finish makes the step they describe. Shards that together cover every element once give the bits of one
 * process. */
/* Rules that are two_pass need a third call, norms, between them, with the statistics as begin's were agreed on: it
 * fills those from halfstep_norms_offset() on, which are then added over the ranks in the same way. It does nothing for
 * other rules. finish without it makes the sums by itself, which needs whole tensors here (ORDER otherwise).
 * A rule with totals keeps one set of scalars for all tensors whose groups have one number in its hyper-parameter
 * "d_group". Where several handles have such tensors, the caller adds up the first totals *
 * halfstep_round_statistics_count() integers of each tensor (halfstep_tensor_statistics_count() says where the next
 * tensor's are), gives the sum to one tensor of each handle, with a gradient or without, and 0 to the others. All
 * handles make every step, and start from equal scalars: set those of the handle whose first scalar is largest. */
HALFSTEP_API int64_t halfstep_statistics_count(const halfstep_optimizer *optimizer);
HALFSTEP_API int64_t halfstep_norms_offset(const halfstep_optimizer *optimizer);
HALFSTEP_API int halfstep_step_begin(halfstep_optimizer *optimizer, const void *const *gradients, int64_t *statistics);
HALFSTEP_API int halfstep_step_norms(halfstep_optimizer *optimizer, void *const *weights, const void *const *gradients,
                                     int64_t *statistics);
HALFSTEP_API int halfstep_step_finish(halfstep_optimizer *optimizer, void *const *weights, const void *const *gradients,
                                      const int64_t *statistics);

/* Gradient release: one update of one tensor, as soon as its gradient exists. Not finite: that tensor is left alone
 * and HALFSTEP_NONFINITE returned. When all tensors of a round have had theirs, halfstep_end_round() advances the
 * schedules and the delayed clipping norm. UNSUPPORTED for parts, as in halfstep_step(), for rules with totals, and
 * where a round with clipping had any. */
HALFSTEP_API int halfstep_step_tensor(halfstep_optimizer *optimizer, int32_t tensor, void *weight,
                                      const void *gradient);
HALFSTEP_API int halfstep_end_round(halfstep_optimizer *optimizer);

/* Both in halves, for ranks that hold parts. For one tensor as for all of them: begin, norms where the rule is
 * two_pass, finish, its statistics added over the ranks that share the tensor. A round: begin writes
 * halfstep_round_statistics_count() integers, to be added over all ranks among which the tensors are divided (not over
 * replicas), whether or not they share tensors; finish takes the norm from them. HALFSTEP_NONFINITE if that is not
 * finite: then the round goes on. */
HALFSTEP_API int64_t halfstep_tensor_statistics_count(const halfstep_optimizer *optimizer, int32_t tensor);
HALFSTEP_API int64_t halfstep_tensor_norms_offset(void);
HALFSTEP_API int halfstep_step_tensor_begin(halfstep_optimizer *optimizer, int32_t tensor, const void *gradient,
                                            int64_t *statistics);
HALFSTEP_API int halfstep_step_tensor_norms(halfstep_optimizer *optimizer, int32_t tensor, void *weight,
                                            const void *gradient, int64_t *statistics);
HALFSTEP_API int halfstep_step_tensor_finish(halfstep_optimizer *optimizer, int32_t tensor, void *weight,
                                             const void *gradient, const int64_t *statistics);
HALFSTEP_API int64_t halfstep_round_statistics_count(void);
HALFSTEP_API int halfstep_end_round_begin(halfstep_optimizer *optimizer, int64_t *statistics);
HALFSTEP_API int halfstep_end_round_finish(halfstep_optimizer *optimizer, const int64_t *statistics);

/* accumulator += scale * gradient for one tensor, in the given format ("f32", "bf16", "bf16-sr", "f16"); the
 * accumulator has the shape of the part held here. With "bf16-sr" it consumes random bits of the tensor's gradient
 * slot. The accumulator is then the gradient of a step. Not finite values go through: the step will judge them. Groups
 * and tensors may still be added afterwards. */
HALFSTEP_API int halfstep_accumulate(halfstep_optimizer *optimizer, int32_t tensor, void *accumulator,
                                     const char *format,
                                     const void *gradient, const char *gradient_format, double scale);

/* Optimizer accumulation: a micro-step, which puts the gradients into the states and leaves the weights alone; the last
 * gradient of a step is given to halfstep_step(). Decay rates act on every micro-step, second moments see the squares
 * of micro-gradients, and gradients are not divided by their number: moments average. No clipping. Bias corrections
 * count micro-steps; schedules, Lookahead and averages of weights count steps. Not finite: as in a step. Errors:
 * UNSUPPORTED where micro-gradients would be lost (sgd and rmsprop without momentum, schedulefree, ema) and for l2
 * decay, which only the last gradient would get. */
HALFSTEP_API int halfstep_accumulate_states(halfstep_optimizer *optimizer, const void *const *gradients);
/* The same for one tensor, in gradient release. */
HALFSTEP_API int halfstep_accumulate_states_tensor(halfstep_optimizer *optimizer, int32_t tensor, const void *gradient);
/* Both in halves, for ranks that hold parts (UNSUPPORTED above, as in a step, and here where the scale of a state is a
 * sum over the tensor); as many statistics as of a step. */
HALFSTEP_API int halfstep_accumulate_states_begin(halfstep_optimizer *optimizer, const void *const *gradients,
                                                  int64_t *statistics);
HALFSTEP_API int halfstep_accumulate_states_finish(halfstep_optimizer *optimizer, const void *const *gradients,
                                                   const int64_t *statistics);
HALFSTEP_API int halfstep_accumulate_states_tensor_begin(halfstep_optimizer *optimizer, int32_t tensor,
                                                         const void *gradient, int64_t *statistics);
HALFSTEP_API int halfstep_accumulate_states_tensor_finish(halfstep_optimizer *optimizer, int32_t tensor,
                                                          const void *gradient, const int64_t *statistics);

/* ---- What happened ----------------------------------------------------------------------------------------------- */

/* Steps (or, with "per-tensor" judging and in release, single tensors) refused so far because of a non-finite
 * gradient. */
HALFSTEP_API uint64_t halfstep_skipped_steps(const halfstep_optimizer *optimizer);
/* Name of the first offending tensor of the last refusal on this process, "" if none (it may be on another rank). */
HALFSTEP_API const char *halfstep_nonfinite_tensor(const halfstep_optimizer *optimizer);
/* 1 if that tensor's gradient was finite, but times gradient_scale 2^62 or more; else 0. */
HALFSTEP_API int32_t halfstep_gradient_too_large(const halfstep_optimizer *optimizer);
/* Elements of a 16-bit weight that stand at the end of their format's range, +-65504 for IEEE half: weights saturate
 * there instead of becoming infinite. `weight` is the caller's buffer. 0 for formats of more bits. */
HALFSTEP_API int halfstep_saturated(const halfstep_optimizer *optimizer, int32_t tensor, const void *weight,
                                    uint64_t *count);
/* Global gradient norm (after gradient_scale, before clipping) of the last step that computed it (clip_norm > 0), else
 * 0. */
HALFSTEP_API double halfstep_gradient_norm(const halfstep_optimizer *optimizer);
/* Puts back the norm of the last round, which "delayed" clipping in release goes by: save it with the counters.
 * Errors: RANGE unless 0 <= norm < infinity. */
HALFSTEP_API int halfstep_set_gradient_norm(halfstep_optimizer *optimizer, double norm);

/* The largest count of anything that may be set. */
#define HALFSTEP_MAX_COUNT INT64_MAX

/* Counters. All of them, the seed, the generator, the states and the weights are what a checkpoint has to keep. */
typedef struct halfstep_counters {
    uint32_t struct_size;
    int32_t reserved;
    uint64_t id;
    uint64_t state_steps;  /* updates of its states (bias correction) */
    uint64_t full_steps;   /* updates of its weight */
    uint64_t writes;       /* passes that may have drawn random bits: updates of its states and stochastic
                              accumulations, so that writes - state_steps counts the latter */
} halfstep_counters;

HALFSTEP_API int halfstep_get_counters(const halfstep_optimizer *optimizer, int32_t tensor,
                                       halfstep_counters *counters);
/* id may be 0 to keep the tensor's own. Errors: RANGE for a count above HALFSTEP_MAX_COUNT; DUPLICATE. */
HALFSTEP_API int halfstep_set_counters(halfstep_optimizer *optimizer, int32_t tensor,
                                       const halfstep_counters *counters);
/* Keeps *step equal to state_steps, as a float: written now and whenever the count changes, for hosts that show a count
 * for each tensor. The library never reads it. NULL ends it; otherwise it must live as long as the handle. */
HALFSTEP_API int halfstep_bind_step(halfstep_optimizer *optimizer, int32_t tensor, float *step);
/* What is kept for a tensor as a double, by name. Belongs in a checkpoint. Of the rule, by the names of its rule_info:
 * state (adamw-delayed's accumulated_decay), or what the last update was (lamb's weight_norm, update_norm and
 * trust_ratio). Tensors that share totals (prodigy) have one set: that of the tensor whose first scalar is largest
 * counts for all. Of a slot whose slot_info says grid, "NAME.grid", such as "exp_avg_sq.grid": an fp32 number in
 * [1/4, 1] that the stored second moment is to be multiplied by. 1 at first; each write of the state multiplies it by
 * the state's decay rate (a maximum has none), and by 4 where that is below 1/4. Equal on all parts of a tensor. It
 * belongs to the bytes of the slot: set both, or neither; bytes of checkpoints that have no such number are of 1.
 * Errors: NAME; RANGE for a value that no update leaves there. */
HALFSTEP_API int halfstep_get_scalar(const halfstep_optimizer *optimizer, int32_t tensor, const char *name,
                                     double *value);
HALFSTEP_API int halfstep_set_scalar(halfstep_optimizer *optimizer, int32_t tensor, const char *name, double value);
/* Keeps *grid equal to the scalar NAME.grid of a slot that has one, for hosts whose copies of a state are to be whole
 * at any time: written now and whenever it changes, else as halfstep_bind_step(). ARGUMENT for other slots. */
HALFSTEP_API int halfstep_bind_grid(halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, double *grid);
/* Keep *state_steps, *full_steps and *writes equal to the counters of those names, and *value to a scalar of the rule:
 * written now and whenever they change, else as halfstep_bind_step(). Each pointer may be NULL, which ends it. Errors
 * of halfstep_bind_scalar(): NAME for a scalar that the rule does not keep; grids have halfstep_bind_grid(). */
HALFSTEP_API int halfstep_bind_counters(halfstep_optimizer *optimizer, int32_t tensor, int64_t *state_steps,
                                        int64_t *full_steps, int64_t *writes);
HALFSTEP_API int halfstep_bind_scalar(halfstep_optimizer *optimizer, int32_t tensor, const char *name, double *value);
/* Steps of the group so far, which its schedule goes by. RANGE above HALFSTEP_MAX_COUNT. */
HALFSTEP_API int halfstep_get_group_steps(const halfstep_optimizer *optimizer, int32_t group, uint64_t *steps);
HALFSTEP_API int halfstep_set_group_steps(halfstep_optimizer *optimizer, int32_t group, uint64_t steps);
HALFSTEP_API uint64_t halfstep_get_seed(const halfstep_optimizer *optimizer);
HALFSTEP_API int halfstep_set_seed(halfstep_optimizer *optimizer, uint64_t seed);
HALFSTEP_API int halfstep_set_skipped_steps(halfstep_optimizer *optimizer, uint64_t skipped);

/* Bytes held for the part here, in the whole optimizer: the weights' and gradients' own, the extra streams of weights,
 * the states with their scales and, once they exist, what muon works on a matrix in. And how many tensors fell back
 * from a block format. Any pointer may be NULL. */
HALFSTEP_API int halfstep_memory(const halfstep_optimizer *optimizer, uint64_t *weights, uint64_t *gradients,
                                 uint64_t *weight_extras, uint64_t *states, int32_t *fell_back);

/* ---- Tools of the trade ------------------------------------------------------------------------------------------ */

/* Schedule factor for a step, without an optimizer: name as in the choice "schedule", step counted from 0.
 * Errors: NAME, RANGE. */
HALFSTEP_API int halfstep_schedule_factor(const char *name, uint64_t step, double warmup_steps, double total_steps,
                                          double final_fraction, double decay_start, double power, double *factor);
/* Raw words of a generator ("lattice", "mixer", "philox7"): n 32-bit words from pair `first` of the stream (seed, id,
 * write, slot). "lattice" gives those of element formats; write then counts the writes of the slot itself (below 2^63)
 * and words of one element are related within 256 of them. Errors: NAME. For statistical testers. */
HALFSTEP_API int halfstep_random_words(const char *generator, uint64_t seed, uint64_t id, uint64_t write, int32_t slot,
                                       uint64_t first, uint32_t *out, size_t n);
/* Round n floats to BF16 with the library's stochastic rule and the given words (one word serves elements 2k and
 * 2k+1). */
HALFSTEP_API int halfstep_bf16_stochastic(const float *in, uint16_t *out, size_t n, const uint32_t *words);

#ifdef __cplusplus
}
#endif
#endif
