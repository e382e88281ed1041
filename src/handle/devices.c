/* Finds devices by name, and does what callers may ask of one: information, streams, memory. */
#include <string.h>

#include "base/structs.h"
#include "handle/optimizer.h"

const struct hstep_device *hstep_find_device(const char *name, const char **rest)
{
    const struct hstep_device *const devices[] = {hstep_default_device, &hstep_cuda_device};
    if (!name || !*name || !strcmp(name, "cpu")) return hstep_default_device;
    for (size_t i = 1; i < sizeof devices / sizeof *devices; i++) {
        size_t length = strlen(devices[i]->name);
        if (strncmp(name, devices[i]->name, length) || (name[length] && name[length] != ':')) continue;
        *rest = name + length + (name[length] == ':');
        return name[length] && !**rest ? NULL : devices[i];
    }
    return NULL;
}

int halfstep_set_stream(halfstep_optimizer *o, void *stream)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    if (o->device->follow) return hstep_why(o, o->device->follow(&o->context, stream));
    return stream ? hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "the %s has no streams", o->device->name) : HALFSTEP_OK;
}

int halfstep_get_device_info(const char *device, halfstep_device_info *info)
{
    const char *rest = "";
    halfstep_device_info ours = {.name = "", .code = ""};
    const struct hstep_device *found = hstep_find_device(device, &rest);
    if (!info) return HALFSTEP_ERROR_ARGUMENT;
    if (!found || !found->inform) return HALFSTEP_ERROR_NAME;
    found->inform(rest, &ours);
    if (!ours.usable) {
        halfstep_optimizer nobody = {.device = found};
        hstep_why(&nobody, HALFSTEP_ERROR_DEVICE);
    }
    return hstep_give_struct(info, &ours, sizeof ours) ? HALFSTEP_OK : HALFSTEP_ERROR_ARGUMENT;
}

const char *halfstep_device_code(void) { return hstep_cuda_device.code(); }

int halfstep_device_allocate(const halfstep_optimizer *o, uint64_t bytes, void **memory)
{
    if (!o || !memory) return HALFSTEP_ERROR_ARGUMENT;
    *memory = NULL;
    int error = o->device->allocate(&o->context, bytes, memory);
    if (error == HALFSTEP_ERROR_MEMORY) return hstep_fail_memory(o, bytes, "the call");
    return hstep_why(o, error);
}

void halfstep_device_release(const halfstep_optimizer *o, void *memory)
{
    if (o && memory) o->device->release(&o->context, memory);
}

int halfstep_device_copy(const halfstep_optimizer *o, void *to, const void *from, uint64_t bytes)
{
    if (!o || (bytes && (!to || !from))) return HALFSTEP_ERROR_ARGUMENT;
    return bytes ? hstep_wait(o, o->device->copy(&o->context, to, from, bytes)) : HALFSTEP_OK;
}
