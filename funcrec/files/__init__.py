"""Files and folders that are whole or not there, folders that are opened once, tensors in files with CRCs."""

from funcrec.files._opened import Folder as Folder
from funcrec.files._opened import OpenFile as OpenFile
from funcrec.files._opened import read_folder as read_folder
from funcrec.files._tensor_bytes import CHUNK as CHUNK
from funcrec.files._tensor_bytes import chunks as chunks
from funcrec.files._tensor_bytes import crc_of as crc_of
from funcrec.files._tensor_bytes import plain_parts as plain_parts
from funcrec.files._tensor_bytes import write_bytes as write_bytes
from funcrec.files._tensors import DTYPE_NAMES as DTYPE_NAMES
from funcrec.files._tensors import HEAD as HEAD
from funcrec.files._tensors import header_of as header_of
from funcrec.files._tensors import lay as lay
from funcrec.files._whole_file import STALE_S as STALE_S
from funcrec.files._whole_file import SUFFIX as SUFFIX
from funcrec.files._whole_file import as_path as as_path
from funcrec.files._whole_file import flush as flush
from funcrec.files._whole_file import open_file as open_file
from funcrec.files._whole_file import raise_os as raise_os
from funcrec.files._whole_file import write_whole as write_whole
from funcrec.files._whole_folder import folder_path as folder_path
from funcrec.files._whole_folder import write_folder as write_folder
