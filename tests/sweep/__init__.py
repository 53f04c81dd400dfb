"""torch's own database of operators, run on ShardTensors and compared with plain tensors.

`samples` turns an entry of the database into functions of dense tensors, `ways` lays those out,
`judge` runs one sample in one way and says what came of it, `runner` does so for all in processes
that may hang or die, `journal` keeps what was found, and `board` counts it.

`make sweep` runs it all within a budget of time, and goes on where it stopped.
"""
