"""arenapy for other libraries, a module each. Each needs its library when it is used."""
