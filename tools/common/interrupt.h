/* Turns signals into requests: the first signal is recorded, and the work looks for it between two steps.
 *
 * A second SIGINT or SIGTERM ends the process at once. The other signals never do, because they repeat. A terminal that
 * closes sends SIGHUP more than once, every write to a closed pipe raises SIGPIPE, and the kernel sends SIGXCPU each
 * second. The others stay ignored if they were ignored at the start (nohup). */
#ifndef HALFSTEP_INTERRUPT_H
#define HALFSTEP_INTERRUPT_H

#include <signal.h>

void interrupt_install(void);
/* Sets `set` to the signals that become requests. Threads that compute block them, because only the thread that called
 * interrupt_install() has a stack for the handler. */
void interrupt_signals(sigset_t *set);
/* Returns the first signal that has arrived, or 0. The exit status for it is 128 + the signal. */
int interrupt_pending(void);
/* From interrupt_pause() to interrupt_resume(), signals end the process at once. A signal that has been recorded ends
 * it in interrupt_pause(). Meant for a call that may wait for ever while there is nothing to save. Both do nothing
 * without interrupt_install(). */
void interrupt_pause(void);
void interrupt_resume(void);

#endif
