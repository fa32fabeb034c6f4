"""Wording that several families of rules share."""
