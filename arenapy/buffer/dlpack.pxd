# DLPack's layouts, as dlpack.h 1.0 has them.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    KIND_CPU = 1
    KIND_CUDA = 2
    KIND_CUDA_HOST = 3
    KIND_ROCM = 10
    KIND_ROCM_HOST = 11
    KIND_CUDA_MANAGED = 13
    FLAG_READ_ONLY = 1
    FLAG_IS_COPIED = 2
    MAJOR = 1
    MINOR = 0

# Two whole numbers that a user gave; `what` names them in the message of a ValueError.
cdef tuple as_pair(object value, str what)

cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides          # in elements; NULL: C order
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor
    void* context
    void (*deleter)(DLManagedTensor*) noexcept nogil

cdef struct DLManagedTensorVersioned:
    uint32_t major
    uint32_t minor
    void* context
    void (*deleter)(DLManagedTensorVersioned*) noexcept nogil
    uint64_t flags
    DLTensor tensor
