"""The private run: `make_private`, the step, its compiled form, and how a run resumes."""
