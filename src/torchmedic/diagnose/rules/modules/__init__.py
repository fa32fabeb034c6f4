"""TM170 to TM189: modules, optimizers, state dicts and checkpoints that are used in a wrong way."""
