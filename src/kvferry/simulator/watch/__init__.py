"""Who looks on and changes nothing: checkers, the grid, coverage, traces. Begin with `checkers.base`."""
