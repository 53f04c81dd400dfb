"""What redistribution costs, in bytes and time, beside torch's and code written by hand."""
