"""Buffer: who owns its bytes, what state they are in, and how others see them."""
