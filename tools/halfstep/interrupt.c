#include "interrupt.h"

#include <signal.h>
#include <string.h>

static volatile sig_atomic_t pending;

static void note(int number)
{
    pending = number;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
}

void interrupt_install(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_handler = note;
    action.sa_flags = SA_RESTART;
    /* A shell starts background jobs with SIGINT ignored; a handler would bring it back to life there, and an explicit
     * `kill -INT` is exactly what people send to such a job. */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

int interrupt_pending(void) { return pending; }
