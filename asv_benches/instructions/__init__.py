"""Instructions by callgrind, and the comparison with the commit before."""
