from cells import *  # noqa: F403
