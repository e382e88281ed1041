/* Shared libraries that are used where they are found, and never linked with. */
#ifndef HSTEP_CUDA_LIBRARY_H
#define HSTEP_CUDA_LIBRARY_H

/* The first of these, up to NULL, that the process has already, or else that can be loaded; NULL if none can. */
void *hstep_library_open(const char *const *names);
void hstep_library_close(void *library);
/* The function of that name, or NULL, into *place, a pointer to a function. */
void hstep_library_find(void *library, const char *name, void *place);

#endif
