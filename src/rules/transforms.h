/* The rows of transforms.def, and the places of their constants in k[]. */
#ifndef HSTEP_TRANSFORMS_H
#define HSTEP_TRANSFORMS_H

enum {
    HSTEP_NO_TRANSFORM,
#define TRANSFORM(name, ...) HSTEP_TRANSFORM_##name,
#include "rules/transforms.def"
#undef TRANSFORM
    HSTEP_TRANSFORMS
};

#define TRANSFORM(name, ...) enum { __VA_ARGS__, name##_constants };
#include "rules/transforms.def"
#undef TRANSFORM

#endif
