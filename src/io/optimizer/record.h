/* What an optimizer has that a file keeps, and the file's values beside it. docs/checkpoints.md has the layout. */
#ifndef HALFSTEP_IO_RECORD_H
#define HALFSTEP_IO_RECORD_H

#include "io/parts.h"
#include "io/planes.h"

#define HSTEP_OPTIMIZER_FORMAT "halfstep optimizer 1"
#define HSTEP_WEIGHT "weight"

/* Indices of values that both sides have: this optimizer's, and the file's. */
enum { HERE, IN_FILE, SIDES };

typedef struct setting {
    int32_t group; /* or HALFSTEP_ALL_GROUPS */
    const char *name;
    const char *choice[SIDES];  /* value of a choice; NULL for hyper-parameters */
    halfstep_hyper_info limits; /* bounds of a hyper-parameter */
    double number[SIDES];
} setting;

typedef struct group_record {
    char recipe[64];
    halfstep_rule_info rule;
    int32_t row;    /* row of the rule */
    int64_t source; /* number of the file's group that it continues; -1 while unknown */
    halfstep_record numbers[SIDES];
} group_record;

/* A scalar or a grid of a tensor's record, under its name in files. */
typedef struct scalar_record {
    char name[64];
    int is_grid;
    int32_t place; /* index in the record's array */
} scalar_record;

typedef struct tensor_record {
    halfstep_tensor info;
    halfstep_record numbers[SIDES];
    scalar_record scalar[HALFSTEP_MAX_SCALARS + HALFSTEP_MAX_STATES];
    int32_t scalars;
    int has_no_steps; /* 1: the file lists the tensor, but without any step */
    int lacks_grid;   /* 1: the file has no grid of a state that has one here */
} tensor_record;

typedef struct named_tensor {
    const char *name;
    int32_t index;
} named_tensor;

typedef struct record {
    halfstep_optimizer *optimizer;
    int32_t group_count, tensor_count;
    group_record *groups;
    tensor_record *tensors;
    named_tensor *by_name;
    setting *settings;
    size_t setting_count, setting_capacity;
    halfstep_record numbers[SIDES];
    uint64_t *ids;   /* all ids of tensors, here and in the file, sorted; NULL before they are read */
    int takes_parts; /* 1: tensors of which only a part is here are allowed */
} record;

/* Called for each plane of the tensors. A weight's plane may have no byte. */
typedef int plane_visitor(void *context, tensor_record *t, const hstep_plane *plane, int is_weight);

void hstep_free_record(record *r);
int hstep_describe_optimizer(record *r, const halfstep_optimizer *optimizer, int takes_parts, hstep_error *error);
/* Returns the address of scalar number k in the optimizer's or the file's record. */
double *hstep_scalar_of(tensor_record *t, int32_t k, int side);
const named_tensor *hstep_find_tensor(const record *r, const char *name);
/* Copies the caller's options to *ours and points *options there. Fields that the caller's header lacks have their
 * defaults. A NULL *options stays NULL. has_checkpoint: 0 for a file by itself. */
int hstep_take_options(halfstep_file_options *ours, const halfstep_file_options **options, int has_checkpoint,
                       const char *function, hstep_error *error);
/* Calls visit for every plane, in the order of the tensors: first a tensor's states, then its weight unless `weights`
 * is NULL. Weights have the tensors' own names in a file of weights, and a suffix in a file of states. */
int hstep_each_plane(const record *r, void *const *weights, int has_model_file, const halfstep_file_options *options,
                     plane_visitor *visit, void *context, hstep_error *error);
const char *hstep_optimizer_file(const halfstep_file_options *options);
const char *hstep_model_file(const halfstep_file_options *options);

#endif
