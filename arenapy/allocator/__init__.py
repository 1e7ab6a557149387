"""What Bump, Slab and Pool have in common."""
