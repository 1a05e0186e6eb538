from hypothesis import settings

# The same examples in every run: a failure is a change of the code, not of the dice. To look for new ones:
# pytest --hypothesis-profile=default
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")
