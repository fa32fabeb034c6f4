"""The same Diagnosis in every dress."""
