# How much of what is freed glibc's malloc keeps, for the whole process.

# From the first `keep` to the last `keep_no_more`. Both do nothing where malloc is not glibc's.
cdef int keep() except -1
cdef int keep_no_more() except -1
