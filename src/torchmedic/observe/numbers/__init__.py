"""Whether loss, gradients and weights are finite, without waiting for the device."""
