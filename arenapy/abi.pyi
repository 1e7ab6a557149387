ABI: int
