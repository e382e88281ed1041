#include "common/interrupt.h"

#include <string.h>

#include "common/text.h"

/* People and batch systems send them. SIGXCPU comes from the kernel, at a limit of processor time. */
static const int requests[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGUSR1, SIGUSR2, SIGXCPU};
enum { REQUESTS = COUNT_OF(requests) };

static volatile sig_atomic_t pending;
static int installed, kept_ignored[REQUESTS];

static void note(int number)
{
    if (!pending) pending = number;
    if (number != SIGINT && number != SIGTERM) return;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
}

static void set_all(void (*handler)(int))
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    /* Without the mask, the handler of a second signal could run before that of the first. */
    interrupt_signals(&action.sa_mask);
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    for (int i = 0; i < REQUESTS; i++)
        if (!kept_ignored[i]) sigaction(requests[i], &action, NULL);
}

void interrupt_install(void)
{
    for (int i = 0; i < REQUESTS; i++) {
        struct sigaction before;
        /* A shell starts background jobs with SIGINT ignored. SIGINT and SIGTERM get their handler even then, because
         * an explicit `kill -INT` is what people send to such a job. */
        int asked_for = requests[i] == SIGINT || requests[i] == SIGTERM;
        kept_ignored[i] = !asked_for && sigaction(requests[i], NULL, &before) == 0 && before.sa_handler == SIG_IGN;
    }
    /* Machine code of oneDNN lets the stack pointer point into the heap. The frame of a signal would overwrite what is
     * there, so the handler has a stack of its own. */
    static char stack[1 << 16];
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, NULL);
    installed = 1;
    set_all(note);
}

void interrupt_signals(sigset_t *set)
{
    sigemptyset(set);
    for (int i = 0; i < REQUESTS; i++) sigaddset(set, requests[i]);
}

int interrupt_pending(void) { return pending; }

void interrupt_pause(void)
{
    if (!installed) return;
    set_all(SIG_DFL);
    if (pending) raise(pending);
}

void interrupt_resume(void)
{
    if (installed) set_all(note);
}
