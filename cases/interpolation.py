"""What every bilinear operator has in common."""

# Roundings on the path through one bilinear value: both weights, their product, the pixel, three additions.
BILINEAR_ROUNDINGS = 7
