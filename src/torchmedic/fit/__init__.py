"""Predict the memory of a training step without a device, and plan the fastest settings that fit."""
