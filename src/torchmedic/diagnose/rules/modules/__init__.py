"""TM17x and TM18x: modules, optimizers, state dicts and checkpoints that are used in a wrong way."""
