"""Every rule of weft's own against the plain call, by brute force.

`calls` takes ATen calls out of torch's database of operators, `judge` carries out each of them in
every way in which its operands can be laid out on small meshes (as `weft.check_rule` does for
users' rules). `make soundness` does so for all ops of the tables.
"""
