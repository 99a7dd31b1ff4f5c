"""Links: one file for each piece that a chain can be made of."""
