"""What a call costs: weft beside plain torch, a no-op wrapper, hand-written SPMD and DTensor."""
