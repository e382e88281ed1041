/* Shared libraries that are found at run time and never linked with. */
#ifndef HSTEP_CUDA_LIBRARY_H
#define HSTEP_CUDA_LIBRARY_H

/* Returns the first library of a list, which ends with NULL. Libraries that the process has already come first, then
 * those that can be loaded. Returns NULL if none can. */
void *hstep_library_open(const char *const *names);
void hstep_library_close(void *library);
/* Writes the address of the function of that name, or NULL, to *place, a pointer to a function. */
void hstep_library_find(void *library, const char *name, void *place);

#endif
