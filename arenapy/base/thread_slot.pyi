# C functions only.
