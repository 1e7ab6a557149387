"""Bump: a cursor, marks and scopes."""
