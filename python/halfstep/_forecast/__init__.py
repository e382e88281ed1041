"""What a step of a model would take: tracing without memory, and the drawing of reports."""
