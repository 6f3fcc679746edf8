"""Many histories: `batch` runs them, `shrink` makes a failing one smaller, `mutation` tries the checkers."""
