/* SIGINT and SIGTERM as a request: the first one is noted and left for the work to see between two steps, a second one
 * ends the process at once. */
#ifndef HALFSTEP_INTERRUPT_H
#define HALFSTEP_INTERRUPT_H

void interrupt_install(void);
/* The signal that has arrived, or 0. The exit status it asks for is 128 + the signal. */
int interrupt_pending(void);

#endif
