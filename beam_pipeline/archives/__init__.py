"""Archives as folders: an image may be a range of an object, of a zip or tar file or of a tar in a tar.

members     the files of an archive, sorted, and where each one's bytes are
zip, tar    finding them: by the directory at a zip's end, or from one tar header to the next
tree        listings that go on inside archives
"""
