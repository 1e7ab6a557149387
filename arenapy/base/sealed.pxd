# The rule for classes: see sealed.pyx.

# Python code can neither make objects of `cls` nor derive classes from it; `how` says how to get
# one. For the module that defines the class, right after it.
cdef int seal(type cls, str how=*) except -1
