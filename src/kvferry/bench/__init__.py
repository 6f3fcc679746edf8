"""Load over HTTP, what comes back measured, compared and shown; knows neither vLLM nor NIXL.

From the inside out: `arrivals` and `prompts` say what is sent and when, `dispatch` how, `load` sends it and
keeps a record per request; `metrics` and `statistics` make figures of records. `grid`, `plan`, `results`
and `compare` run many loads against pairs of engines; `analysis` with `costs` and `checks`,
`targets` and `report` show them.
"""
