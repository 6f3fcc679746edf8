"""KV geometry: what a rank's cache looks like and how one cache's bytes map to another's.

`spec` describes a cache, `compare` says why two cannot be joined, `ranks` which ranks meet, `plan` turns
two descriptions into a copy plan, `descriptors` expands a plan for a transfer's blocks, `spans` holds lists
of block ids, `runs` the byte runs that a transport moves. Import from these modules; nothing is loaded here.
"""
