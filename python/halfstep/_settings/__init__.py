"""Options, groups and names of parameters, and what they mean to the library."""
