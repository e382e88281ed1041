"""Where parameters are stepped: beside their weights, in CPU memory, in buffers on a GPU."""
