/* The same for C++. */
#include "header_test_c.c"
