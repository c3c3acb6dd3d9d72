"""The job as Beam transforms: they wire; the functions they call do the work and are tested without Beam."""
