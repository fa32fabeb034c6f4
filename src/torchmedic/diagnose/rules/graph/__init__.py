"""TM1xx: the graph, from shapes and types that do not fit to autograd."""
