"""The reference policy of the KL penalty: what the policy must not go too far from.

It never changes: the start weights (or those of `--reference_model_name_or_path`), also after a
resume. With an adapter it is the policy itself, whose own weights are frozen, with the adapter
switched off, and costs no memory; without one it is a second model, sharded like the policy.
"""
