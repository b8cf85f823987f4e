"""Operations on images and the views made of them. Other inputs are refused here (`Inputs.images`), but for a user's own view."""
