"""A transformer over four local ranks, beside the same in one process."""
