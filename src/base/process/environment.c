#include "base/process/environment.h"

#include <stdatomic.h>

static const struct hstep_variable variables[HSTEP_SETTINGS] = {
    [HSTEP_SET_THREADS] = {"HALFSTEP_THREADS", NULL, 1024},
    [HSTEP_SET_PIN] = {"HALFSTEP_PIN", "0, 1", 0},
    [HSTEP_SET_DEVICE_CHECK] = {"HALFSTEP_DEVICE_CHECK", "always, once, never", 0},
};

static atomic_int found[HSTEP_SETTINGS] = {HSTEP_NOT_SET, HSTEP_NOT_SET, HSTEP_NOT_SET};

int hstep_read_environment(char *text, size_t size)
{
    for (int i = 0; i < HSTEP_SETTINGS; i++) {
        const int value = hstep_read_variable(&variables[i], text, size);
        atomic_store(&found[i], value < 0 ? HSTEP_NOT_SET : value);
        if (value == HSTEP_MALFORMED) return value;
    }
    return 0;
}

int hstep_setting(enum hstep_setting setting) { return atomic_load(&found[setting]); }
