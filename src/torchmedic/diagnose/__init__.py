"""Evidence -> Diagnosis: a named cause at a place in the source, with a grade."""
