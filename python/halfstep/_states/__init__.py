"""States: their layout, reading, writing, converting, files, and whose they are."""
