"""Attacks, carried out: hostile files, malformed requests, another Unix user. `make attack` runs them for longer."""
