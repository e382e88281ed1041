/* Judges calls of halfstep_io by the codes that they return and the messages that they leave. */
#ifndef HALFSTEP_TESTS_MESSAGES_H
#define HALFSTEP_TESTS_MESSAGES_H

#include "calls.h"
#include "test.h"

static char message[1024];
#define TEXT message, sizeof message

/* Checks that the last message contains `words`. */
#define SAYS(words) CHECK(strstr(message, words), "\"%s\" lacks \"%s\"", message, words)

/* Checks that a call succeeds. */
#define WORKS(call) CHECK(!(call), "%s: %s", #call, message)

/* Checks that a call fails with `code` and a message that contains `words`. */
#define FAILS(call, code, words)                                                       \
    do {                                                                               \
        int result = (call);                                                           \
        CHECK(result == (code), "%s is %d, not %d: %s", #call, result, code, message); \
        SAYS(words);                                                                   \
    } while (0)

#endif
